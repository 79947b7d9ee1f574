"""Binding of the native row-wise operations (ops/native/rowwise.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from batchinfer.ops import quantised, reference
from batchinfer.ops.native.products import products_with
from batchinfer.ops.rows import Product, QuantRows, ScaledRows, to_dense
from batchinfer.ops.table import Ops

LANES = 16
POINTER, COUNT = ctypes.c_void_p, ctypes.c_int64


class _Input(ctypes.Structure):
    _fields_ = [(name, POINTER) for name in ("values", "scale", "bias")]


class _Output(ctypes.Structure):
    _fields_ = [(name, POINTER) for name in ("codes", "scale")]


class _Norm(ctypes.Structure):
    _fields_ = [
        ("x", _Input),
        *((name, POINTER) for name in ("residual", "weight", "total", "out")),
        ("codes", _Output),
        ("rows", COUNT),
        ("size", COUNT),
        ("eps", ctypes.c_float),
    ]


class _Gate(ctypes.Structure):
    _fields_ = [("gate_up", _Input), ("out", POINTER), ("codes", _Output), ("rows", COUNT), ("size", COUNT)]


class _Quantise(ctypes.Structure):
    _fields_ = [("x", POINTER), ("codes", _Output), ("rows", COUNT), ("size", COUNT)]


def native_ops(library: ctypes.CDLL) -> Ops:
    """The CPU's table for plain rows, with norms, gated activation and products from the native library.

    Shapes that the kernels do not do (an inner size that is no multiple of 16) go to the reference.
    """
    norm, gate = _bound(library, "batchinfer_rms_norm", _Norm), _bound(library, "batchinfer_silu_and_mul", _Gate)

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, size = x.shape
        if size % LANES:
            return reference.rms_norm(x, weight, eps)
        x, out = x.contiguous(), torch.empty(rows, size, dtype=x.dtype)
        norm(_Norm(_plain(x), None, weight.data_ptr(), None, out.data_ptr(), _Output(), rows, size, eps), _is_bf16(x))
        return out

    def add_rms_norm(product: Product, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = to_dense(product, residual.dtype)
        rows, size = x.shape
        if size % LANES:
            return reference.add_rms_norm(x, residual, weight, eps)
        x, residual = x.contiguous(), residual.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(x)
        record = _Norm(_plain(x), residual.data_ptr(), weight.data_ptr(), total.data_ptr(), out.data_ptr(), _Output(), rows, size, eps)
        norm(record, _is_bf16(x))
        return out, total

    def silu_and_mul(product: Product) -> Tensor:
        gate_up = to_dense(product, torch.float32)
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        if size % LANES:
            return reference.silu_and_mul(gate_up)
        gate_up, out = gate_up.contiguous(), torch.empty(rows, size, dtype=gate_up.dtype)
        gate(_Gate(_plain(gate_up), out.data_ptr(), _Output(), rows, size), _is_bf16(gate_up))
        return out

    matmul = products_with(library, _native_enter(library))
    return Ops(rms_norm=rms_norm, add_rms_norm=add_rms_norm, silu_and_mul=silu_and_mul, enter=reference.enter, matmul=matmul)


def native_int8_ops(library: ctypes.CDLL) -> Ops:
    """The CPU's table around 8-bit products, each operation one native call from what a product left to what the next reads.

    Shapes that the kernels do not do (an inner size that is no multiple of 16) go to the reference.
    """
    norm, gate = _bound(library, "batchinfer_rms_norm", _Norm), _bound(library, "batchinfer_silu_and_mul", _Gate)

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> QuantRows:
        rows, size = x.shape
        if size % LANES:
            return quantised.rms_norm(x, weight, eps)
        x, (out, place) = x.contiguous(), _new_rows(rows, size)
        norm(_Norm(_plain(x), None, weight.data_ptr(), None, None, place, rows, size, eps), _is_bf16(x))
        return out

    def add_rms_norm(x: Product, residual: Tensor, weight: Tensor, eps: float) -> tuple[QuantRows, Tensor]:
        rows, size = residual.shape
        if size % LANES:
            return quantised.add_rms_norm(x, residual, weight, eps)
        x = x if isinstance(x, ScaledRows) else x.to(residual.dtype).contiguous()
        residual, (out, place) = residual.contiguous(), _new_rows(rows, size)
        total = torch.empty_like(residual)
        record = _Norm(_input(x), residual.data_ptr(), weight.data_ptr(), total.data_ptr(), None, place, rows, size, eps)
        norm(record, _is_bf16(residual))
        return out, total

    def silu_and_mul(gate_up: Product) -> QuantRows:
        x = gate_up.values if isinstance(gate_up, ScaledRows) else gate_up
        rows, size = x.shape[0], x.shape[1] // 2
        if size % LANES:
            return quantised.silu_and_mul(gate_up)
        gate_up = gate_up if isinstance(gate_up, ScaledRows) else gate_up.contiguous()
        out, place = _new_rows(rows, size)
        gate(_Gate(_input(gate_up), None, place, rows, size), _is_bf16(x))
        return out

    enter = _native_enter(library)
    matmul = products_with(library, enter)
    return Ops(rms_norm=rms_norm, add_rms_norm=add_rms_norm, silu_and_mul=silu_and_mul, enter=enter, matmul=matmul)


def _native_enter(library: ctypes.CDLL) -> Callable[[Tensor], QuantRows]:
    """Plain rows to 8 bits, in one native call."""
    quantise = _bound(library, "batchinfer_quantise", _Quantise)

    def enter(x: Tensor) -> QuantRows:
        rows, size = x.shape
        if size % LANES:
            return quantised.enter(x)
        x, (out, place) = x.contiguous(), _new_rows(rows, size)
        quantise(_Quantise(x.data_ptr(), place, rows, size), _is_bf16(x))
        return out

    return enter


def _bound(library: ctypes.CDLL, name: str, record: type[ctypes.Structure]) -> Callable[[ctypes.Structure, int], None]:
    function = getattr(library, name)
    function.argtypes = [ctypes.POINTER(record), ctypes.c_int32]
    function.restype = None
    return function  # type: ignore[no-any-return]


def _plain(x: Tensor) -> _Input:
    return _Input(x.data_ptr())


def _input(x: Product) -> _Input:
    """The record holds no reference: `x` must outlive the call."""
    if isinstance(x, Tensor):
        return _Input(x.data_ptr())
    return _Input(x.values.data_ptr(), x.scale.data_ptr(), None if x.bias is None else x.bias.data_ptr())


def _new_rows(rows: int, size: int) -> tuple[QuantRows, _Output]:
    out = QuantRows(torch.empty(rows, size, dtype=torch.uint8), torch.empty(rows))
    return out, _Output(out.values.data_ptr(), out.scale.data_ptr())


def _is_bf16(x: Tensor) -> int:
    return int(x.dtype is torch.bfloat16)
