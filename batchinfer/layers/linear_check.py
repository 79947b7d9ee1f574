"""The self-test behind "the same bytes at any concurrency": does a row's product depend on its neighbours here?

A library's matrix kernels may choose another order of summation for another number of rows. On the processors
measured they do not (float32 from 8 rows on); this checks it for a layer shape on the machine at hand.
"""

from __future__ import annotations

import torch

from batchinfer.layers.linear import Linear, Pack
from batchinfer.ops.table import Ops

ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 129)
MOST_ROWS = 256
WINDOWS = 16  # places at which a small batch is cut out: rounding to bf16 hides most differences of a single row


def differing_row_counts(pack: Pack, ops: Ops, shape: tuple[int, int], dtype: torch.dtype) -> list[int]:
    """Numbers of rows at which a product of `shape` (out, in) gives a row other bits than among `MOST_ROWS` rows."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    x = torch.randn(MOST_ROWS, shape[1], generator=generator).to(dtype)
    linear = Linear(pack(weight, None), ops)
    whole = linear(x)

    def differs(count: int) -> bool:
        starts = range(0, MOST_ROWS - count, (MOST_ROWS - count) // (WINDOWS if count <= 8 else 2))
        return any(not torch.equal(linear(x[i : i + count].clone()), whole[i : i + count]) for i in starts)

    return [count for count in ROW_COUNTS if differs(count)]
