"""Weights as matrix registers (AMX) read them; ops/native/linear_amx.cpp multiplies them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer.layers.linear import INT8_MOST, int8_codes
from batchinfer.ops.layouts import TileBf16, TileInt8
from batchinfer.ops.rows import ZERO_POINT

PANEL, LANES = 32, 16  # outputs that are multiplied side by side, in tiles of 16
GROUPS = 16  # of inputs in a tile: 64 bytes of every output


def pack_tile_bf16(weight: Tensor, bias: Tensor | None) -> TileBf16:
    """The tiles of a bf16 weight [out, in]."""
    out, size = weight.shape
    return TileBf16(_tiles(weight, 2), out, size, None if bias is None else bias.float())


def pack_tile_int8(weight: Tensor, bias: Tensor | None) -> TileInt8:
    """The tiles of the codes that `pack_int8` gives; `weight` best in float32."""
    codes, scale = int8_codes(weight, INT8_MOST)
    shift = ZERO_POINT * codes.sum(1, dtype=torch.int32)
    return TileInt8(_tiles(codes, 4), scale, shift, weight.shape[1], None if bias is None else bias.float())


def outputs_of(layout: TileBf16, ids: Tensor) -> Tensor:
    """The weights bf16 [N, in] of some outputs, int64 [N]."""
    some = layout.tiles[ids // PANEL, :, ids % PANEL // LANES, :, ids % LANES]
    return some.reshape(len(ids), -1)[:, : layout.size]


def _tiles(weight: Tensor, together: int) -> Tensor:
    """weight [out, in] -> [panels, steps, 2, 16, 16, together]."""
    out, size = weight.shape
    step = GROUPS * together
    weight = F.pad(weight, (0, -size % step, 0, -out % PANEL))
    return weight.view(-1, PANEL // LANES, LANES, weight.shape[1] // step, GROUPS, together).permute(0, 3, 1, 4, 2, 5).contiguous()
