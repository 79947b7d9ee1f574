"""Binding of the native row-wise operations (ops/native/rowwise.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from batchinfer.ops import reference
from batchinfer.ops.cpu import CPU, CPU_INT8
from batchinfer.ops.rows import Product, to_dense
from batchinfer.ops.table import Ops

LANES = 16
POINTER, COUNT = ctypes.c_void_p, ctypes.c_int64


class _Norm(ctypes.Structure):
    _fields_ = [
        *((name, POINTER) for name in ("x", "residual", "weight", "out", "total")),
        ("rows", COUNT),
        ("size", COUNT),
        ("eps", ctypes.c_float),
    ]


class _Gate(ctypes.Structure):
    _fields_ = [("gate_up", POINTER), ("out", POINTER), ("rows", COUNT), ("size", COUNT)]


def native_ops(library: ctypes.CDLL) -> Ops:
    """The CPU's table with norms and gated activation from the native library.

    Shapes that the kernels do not do (an inner size that is no multiple of 16) go to the reference.
    """

    def bound(name: str, record: type[ctypes.Structure]) -> Callable[..., None]:
        function = getattr(library, name)
        function.argtypes = [ctypes.POINTER(record), ctypes.c_int32]
        function.restype = None
        return function  # type: ignore[no-any-return]

    norm, gate = bound("batchinfer_rms_norm", _Norm), bound("batchinfer_silu_and_mul", _Gate)

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, size = x.shape
        if size % LANES:
            return reference.rms_norm(x, weight, eps)
        x, out = x.contiguous(), torch.empty(rows, size, dtype=x.dtype)
        norm(_Norm(x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), None, rows, size, eps), _is_bf16(x))
        return out

    def add_rms_norm(product: Product, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = to_dense(product, residual.dtype)
        rows, size = x.shape
        if size % LANES:
            return reference.add_rms_norm(x, residual, weight, eps)
        x, residual = x.contiguous(), residual.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(x)
        record = _Norm(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr(), rows, size, eps)
        norm(record, _is_bf16(x))
        return out, total

    def silu_and_mul(product: Product) -> Tensor:
        gate_up = to_dense(product, torch.float32)
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        if size % LANES:
            return reference.silu_and_mul(gate_up)
        gate_up, out = gate_up.contiguous(), torch.empty(rows, size, dtype=gate_up.dtype)
        gate(_Gate(gate_up.data_ptr(), out.data_ptr(), rows, size), _is_bf16(gate_up))
        return out

    return replace(CPU, rms_norm=rms_norm, add_rms_norm=add_rms_norm, silu_and_mul=silu_and_mul)


def native_int8_ops(library: ctypes.CDLL) -> Ops:
    """The CPU's table around 8-bit products."""
    return CPU_INT8


def _is_bf16(x: Tensor) -> Any:
    return int(x.dtype is torch.bfloat16)
