"""Every operation in plain torch: the oracle, and what runs where nothing faster is built."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer.ops.layouts import Dense, GroupInt4, Int8Channel, OneDnnBf16, PanelInt4, TileBf16, TileInt8
from batchinfer.ops.row_sizes import in_row_sizes, pad_rows
from batchinfer.ops.rows import ZERO_POINT, Entry, Product, ScaledRows, quantise_rows, to_dense

ROWS = 8  # float32 products treat all rows alike from 8 rows on, in multiples of 8
LANES = 16  # outputs that lie side by side in the native 4-bit layout
ROWS_BF16 = 2  # oneDNN sums a single bf16 row in another order when it is long (1,536 inputs and more, measured)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H] scaled by its root mean square, in float32, times weight [H] (Zhang and Sennrich, arXiv:1910.07467)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: Product, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual)."""
    total = to_dense(x, residual.dtype) + residual
    return rms_norm(total, weight, eps), total


def silu_and_mul(gate_up: Product) -> Tensor:
    """[T, 2 * I] -> silu(first half) * second half (SwiGLU; Shazeer, arXiv:2002.05202)."""
    gate, up = to_dense(gate_up, torch.float32).chunk(2, dim=-1)
    return F.silu(gate) * up


def enter(x: Tensor) -> Tensor:
    """Rows as a linear layer of this table reads them: as they are."""
    return x


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q and k [T, heads, D] by cos and sin float32 [T, 1, N], N up to D / 2: entry i < N is paired with i + N, entries from
    2 * N on stay (Su et al., arXiv:2104.09864).
    """
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = torch.split(x.float(), [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def dense_matmul(x: Tensor, layout: Dense) -> Tensor:
    """x [T, in] -> [T, out]. Float32 on the CPU is padded to full groups of rows, so that no row sees its neighbours."""

    def product(rows: Tensor) -> Tensor:
        return F.linear(rows, layout.weight, layout.bias)

    if layout.sizes:
        return in_row_sizes(product, layout.sizes, x)
    rows = x.shape[0]
    multiple = ROWS if x.device.type == "cpu" else 1
    return product(pad_rows(x, -rows % multiple))[:rows]


def onednn_bf16_matmul(x: Tensor, layout: OneDnnBf16) -> Tensor:
    """x bf16 [T, in] -> bf16 [T, out], accumulated in float32; a single row is padded, so that it sums as in a batch."""

    def product(rows: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, layout.packed, layout.bias, "none", [], "")
        return out

    if layout.sizes:
        return in_row_sizes(product, layout.sizes, x)
    rows = x.shape[0]
    return product(pad_rows(x, max(0, ROWS_BF16 - rows)))[:rows]


def onednn_bf16_remainder(x: Tensor, layout: OneDnnBf16, rounded: Tensor) -> Tensor:
    """What rounding took from outputs that came out as `rounded` bf16 [T]: bf16 [T, out], subtracted before oneDNN rounds the sums."""

    def product(rows: Tensor, less: Tensor) -> Tensor:
        less = less.expand(-1, layout.packed.shape[0]).contiguous()
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, less, layout.packed, layout.bias, "add")
        return out

    less = -rounded[:, None]
    if layout.sizes:
        return in_row_sizes(product, layout.sizes, x, less)
    pad = max(0, ROWS_BF16 - x.shape[0])
    return product(pad_rows(x, pad), pad_rows(less, pad))[: x.shape[0]]


def int8_matmul(x: Entry, layout: Int8Channel) -> ScaledRows:
    """x [T, in] -> [T, out], summed exactly in int32; the row scales and the bias are left to the next operation.

    Plain rows are quantised first (a head in 8 bits behind other layers). oneDNN's fast path takes unsigned rows: signed ones would fall to an implementation a hundred times slower.
    """
    if isinstance(x, Tensor):
        x = quantise_rows(x)
    product = torch.ops.onednn.qlinear_pointwise
    values: Tensor = product(
        x.values, 1.0, ZERO_POINT, layout.packed, layout.scale, layout.zero, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return ScaledRows(values, x.scale, layout.bias)


def int4_matmul(x: Tensor, layout: GroupInt4) -> Tensor:
    """x [T, in] -> [T, out] in x's dtype, weights widened to bf16 on the way (torch's kernel; its float32 one is a loop)."""
    out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(_bf16(x), layout.packed, layout.group, layout.scale_offset)
    return _finish(out, layout.bias, x.dtype)


def panel_int4_matmul(x: Tensor, layout: PanelInt4) -> Tensor:
    """x [T, in] -> [T, out] in x's dtype: rows rounded to bf16, everything else in float32."""
    vectors, groups = layout.codes.shape[:2]
    lanes = layout.codes.permute(0, 3, 1, 2)  # [out / 16, 16, in / 32, 4]
    shifts = torch.tensor([(4 * pair, 16 + 4 * pair) for pair in range(4)], dtype=torch.int32).view(-1)
    codes = (lanes[..., None] >> shifts & 15).reshape(vectors, LANES, groups, 32).float()
    step, least = layout.grid.float().permute(2, 0, 3, 1)[..., None].unbind(0)  # [out / 16, 16, in / 32, 1]
    weight = (codes * step + least).reshape(vectors * LANES, groups * 32)
    return _finish(dense_matmul(x.to(torch.bfloat16).float(), Dense(weight, None)), layout.bias, x.dtype)


def tile_bf16_matmul(x: Tensor, layout: TileBf16) -> Tensor:
    """x bf16 [T, in] -> bf16 [T, out], accumulated in float32."""
    weight = tile_weight(layout.tiles)[: layout.out, : layout.size].float()
    return _finish(dense_matmul(x.float(), Dense(weight, None)), layout.bias, x.dtype)


def tile_int8_matmul(x: Entry, layout: TileInt8) -> ScaledRows:
    """As `int8_matmul`."""
    rows = quantise_rows(x) if isinstance(x, Tensor) else x
    codes = tile_weight(layout.tiles)[: len(layout.scale), : layout.size]
    sums = rows.values.double() @ codes.double().T - layout.shift  # exact: far below 2 ** 53
    return ScaledRows(sums.float() * layout.scale, rows.scale, layout.bias)


def tile_weight(tiles: Tensor) -> Tensor:
    """The weight [out, in] of tiles, with the zeros behind both."""
    panels, steps, halves, groups, lanes, together = tiles.shape
    return tiles.permute(0, 2, 4, 1, 3, 5).reshape(panels * halves * lanes, steps * groups * together)


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).contiguous()


def _finish(product: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return product.to(dtype) if bias is None else (product + bias).to(dtype)
