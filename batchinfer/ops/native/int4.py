"""Binding of the native 4-bit product (ops/native/int4.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from batchinfer.ops.layouts import PanelInt4

POINTER, COUNT = ctypes.c_void_p, ctypes.c_int64
GROUP, LANES = 32, 16


class _Product(ctypes.Structure):
    _fields_ = [
        *((name, POINTER) for name in ("x", "codes", "grid", "bias", "y", "sums")),
        *((name, COUNT) for name in ("rows", "inputs", "out")),
    ]


def can_multiply_int4(library: ctypes.CDLL) -> bool:
    """True when the library was built for a processor that multiplies bf16 itself."""
    return bool(library.batchinfer_can_int4())


def native_int4_matmul(library: ctypes.CDLL) -> Callable[[Tensor, PanelInt4], Tensor]:
    """The product x [T, in] -> [T, out] in x's dtype, rows rounded to bf16; for libraries that `can_multiply_int4`."""
    function = library.batchinfer_int4
    function.argtypes, function.restype = [ctypes.POINTER(_Product), ctypes.c_int32], None

    def matmul(x: Tensor, layout: PanelInt4) -> Tensor:
        vectors, groups = layout.codes.shape[:2]
        rows, out = len(x), vectors * LANES
        assert x.shape[1] == groups * GROUP
        narrow, y, sums = x.to(torch.bfloat16).contiguous(), torch.empty(rows, out, dtype=x.dtype), torch.empty(rows, groups)
        record = _Product(
            x=narrow.data_ptr(),
            codes=layout.codes.data_ptr(),
            grid=layout.grid.data_ptr(),
            bias=None if layout.bias is None else layout.bias.data_ptr(),
            y=y.data_ptr(),
            sums=sums.data_ptr(),
            rows=rows,
            inputs=groups * GROUP,
            out=out,
        )
        function(record, int(x.dtype is torch.bfloat16))
        return y

    return matmul
