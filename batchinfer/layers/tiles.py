"""Weights as matrix registers (AMX) read them; ops/native/linear_amx.cpp multiplies them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer.layers.linear import INT8_MOST, int8_codes
from batchinfer.layers.prepared import Form, Packing, Prepared, Tensors, with_bias
from batchinfer.ops.layouts import TileBf16, TileInt8
from batchinfer.ops.rows import ZERO_POINT

PANEL, LANES = 32, 16  # outputs that are multiplied side by side, in tiles of 16
GROUPS = 16  # of inputs in a tile: 64 bytes of every output


def _to_tiles_bf16(weight: Tensor, bias: Tensor | None) -> Prepared:
    """The tiles of a bf16 weight [out, in]."""
    return Prepared(TILES_BF16, with_bias(None if bias is None else bias.float(), tiles=_tiles(weight, 2), shape=_shape_of(weight)))


def _to_tiles_int8(weight: Tensor, bias: Tensor | None) -> Prepared:
    """The tiles of the codes that `pack_int8` gives; `weight` best in float32."""
    codes, scale = int8_codes(weight, INT8_MOST)
    shift = ZERO_POINT * codes.sum(1, dtype=torch.int32)
    tensors = {"tiles": _tiles(codes, 4), "scale": scale, "shift": shift, "shape": _shape_of(weight)}
    return Prepared(TILES_INT8, with_bias(None if bias is None else bias.float(), **tensors))


def _finish_bf16(tensors: Tensors) -> TileBf16:
    out, size = tensors["shape"].tolist()
    return TileBf16(tensors["tiles"], out, size, tensors.get("bias"))


def _finish_int8(tensors: Tensors) -> TileInt8:
    _, size = tensors["shape"].tolist()
    return TileInt8(tensors["tiles"], tensors["scale"], tensors["shift"], size, tensors.get("bias"))


TILES_BF16 = Form("bf16 tiles", _finish_bf16, copies=False)
TILES_INT8 = Form("int8 tiles", _finish_int8, copies=False)
pack_tile_bf16 = Packing(_to_tiles_bf16)
pack_tile_int8 = Packing(_to_tiles_int8)


def outputs_of(layout: TileBf16, ids: Tensor) -> Tensor:
    """The weights bf16 [N, in] of some outputs, int64 [N]."""
    some = layout.tiles[ids // PANEL, :, ids % PANEL // LANES, :, ids % LANES]
    return some.reshape(len(ids), -1)[:, : layout.size]


def _shape_of(weight: Tensor) -> Tensor:
    """(outputs, inputs) as int32 [2]: tiles are padded and do not tell."""
    return torch.tensor(weight.shape, dtype=torch.int32)


def _tiles(weight: Tensor, together: int) -> Tensor:
    """weight [out, in] -> [panels, steps, 2, 16, 16, together]."""
    out, size = weight.shape
    step = GROUPS * together
    weight = F.pad(weight, (0, -size % step, 0, -out % PANEL))
    return weight.view(-1, PANEL // LANES, LANES, weight.shape[1] // step, GROUPS, together).permute(0, 3, 1, 4, 2, 5).contiguous()
