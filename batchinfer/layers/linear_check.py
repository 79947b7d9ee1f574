"""The self-tests behind "the same bytes at any concurrency": does a row's product depend on its neighbours here?

A library's matrix kernels may choose another order of summation for another number of rows. Layers know at which
numbers they do not (row_sizes.py); this checks what comes of it for a layer shape on the machine at hand. 8-bit
products are sums of integers, the same in any order, as long as no step of them goes out of range: that is checked too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer.layers.linear import Linear
from batchinfer.layers.prepared import Packing
from batchinfer.layers.row_sizes import cancelling
from batchinfer.ops.layouts import Int8Channel
from batchinfer.ops.reference import int8_matmul
from batchinfer.ops.rotation import rotate
from batchinfer.ops.rows import ZERO_POINT, Entry, Product, QuantRows
from batchinfer.ops.table import Ops

ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 129)
MOST_ROWS = 256
WINDOWS = 4  # places at which a small batch is cut out
EXTREME_SHAPE = (64, 1024)  # (out, in): some blocks of every kernel in both directions


def differing_row_counts(pack: Packing, ops: Ops, shape: tuple[int, int], dtype: torch.dtype) -> list[int]:
    """Numbers of rows at which a product of `shape` (out, in) gives a row other bits than among `MOST_ROWS` rows."""
    weight, x = (part.to(dtype) for part in cancelling(shape, MOST_ROWS))
    linear = Linear(pack(weight, None), ops)
    rows = ops.enter(x)
    whole = _values(linear(rows))

    def differs(count: int) -> bool:
        starts = range(0, MOST_ROWS - count, (MOST_ROWS - count) // (WINDOWS if count <= 8 else 2))
        return any(not torch.equal(_values(linear(_cut(rows, i, count))), whole[i : i + count]) for i in starts)

    return [count for count in ROW_COUNTS if differs(count)]


def _cut(rows: Entry, start: int, count: int) -> Entry:
    end = start + count
    if isinstance(rows, QuantRows):
        return QuantRows(rows.values[start:end].clone(), rows.scale[start:end].clone())
    return rows[start:end].clone()


def _values(product: Product) -> Tensor:
    return product if isinstance(product, Tensor) else product.values


def int8_product_saturates(pack: Packing) -> bool:
    """True when an 8-bit product of the largest codes is not the exact sum: without VNNI, two products of 8 bits are
    added in 16, which they overflow.
    """
    out, size = EXTREME_SHAPE
    signs = torch.ones(out, size)
    signs[1::4] = -1
    signs[2::4, ::2] = -1
    signs[3::4, : size // 2] = -1
    layout = pack(rotate(signs), None)  # which the pack turns back
    assert isinstance(layout, Int8Channel)
    codes = signs.double() / layout.scale[:, None].double()
    x = torch.tensor([255, 0, 1, 254], dtype=torch.uint8)[:, None].repeat(1, size)
    x[3, ::2] = 0
    expected = (x.double() - ZERO_POINT) @ codes.T * layout.scale.double()
    got = int8_matmul(QuantRows(x, torch.ones(len(x))), layout).values
    return not torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-3)
