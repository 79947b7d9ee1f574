"""Binding of the native products of tiles (ops/native/linear_amx.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer.ops.layouts import TileBf16, TileInt8
from batchinfer.ops.rows import Entry, Product, QuantRows, ScaledRows

POINTER, COUNT = ctypes.c_void_p, ctypes.c_int64


class _Product(ctypes.Structure):
    _fields_ = [
        *((name, POINTER) for name in ("x", "tiles", "scale", "shift", "bias", "y")),
        *((name, COUNT) for name in ("rows", "inputs", "out")),
    ]


def can_multiply_tiles(library: ctypes.CDLL) -> bool:
    """True when the library was built for a processor with matrix registers (AMX)."""
    return bool(library.batchinfer_can_multiply_tiles())


def tile_products(library: ctypes.CDLL, enter: Callable[[Tensor], QuantRows]) -> dict[type, Callable[[Any, Any], Product]]:
    """The products of both layouts of tiles, for libraries that `can_multiply_tiles`.

    Rows x [T, in] -> [T, out]: bf16 to bf16, added up in float32; 8-bit ones exactly, as `reference.int8_matmul` gives
    them. `enter` puts plain rows into 8 bits.
    """
    function = library.batchinfer_multiply_tiles
    function.argtypes, function.restype = [ctypes.POINTER(_Product), ctypes.c_int32], None

    def bf16_matmul(x: Tensor, layout: TileBf16) -> Tensor:
        x, y = _whole_steps(x, layout.tiles), torch.empty(len(x), layout.out, dtype=torch.bfloat16)
        record = _Product(
            x=x.data_ptr(),
            tiles=layout.tiles.data_ptr(),
            bias=None if layout.bias is None else layout.bias.data_ptr(),
            y=y.data_ptr(),
            rows=len(x),
            inputs=x.shape[1],
            out=layout.out,
        )
        function(record, 1)
        return y

    def int8_matmul(x: Entry, layout: TileInt8) -> ScaledRows:
        rows = enter(x) if isinstance(x, Tensor) else x
        values, out = _whole_steps(rows.values, layout.tiles), len(layout.scale)
        y = torch.empty(len(values), out)
        record = _Product(
            x=values.data_ptr(),
            tiles=layout.tiles.data_ptr(),
            scale=layout.scale.data_ptr(),
            shift=layout.shift.data_ptr(),
            y=y.data_ptr(),
            rows=len(values),
            inputs=values.shape[1],
            out=out,
        )
        function(record, 0)
        return ScaledRows(y, rows.scale, layout.bias)

    return {TileBf16: bf16_matmul, TileInt8: int8_matmul}


def _whole_steps(x: Tensor, tiles: Tensor) -> Tensor:
    """x [T, in], with zeros up to the inputs that the tiles hold."""
    _, steps, _, groups, _, together = tiles.shape
    missing = steps * groups * together - x.shape[1]
    assert 0 <= missing < groups * together
    return F.pad(x, (0, missing)) if missing else x.contiguous()
