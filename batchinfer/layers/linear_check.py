"""The self-test behind "the same bytes at any concurrency": does a row's product depend on its neighbours here?

A library's matrix kernels may choose another order of summation for another number of rows. On the processors
measured they do not (float32 from 8 rows on); this checks it for a layer shape on the machine at hand.
"""

from __future__ import annotations

import torch

from batchinfer.layers.linear import Linear, Pack
from batchinfer.ops.table import Ops

ROW_COUNTS = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 129)
MOST_ROWS = 256


def differing_row_counts(pack: Pack, ops: Ops, shape: tuple[int, int], dtype: torch.dtype) -> list[int]:
    """Numbers of rows at which a product of `shape` (out, in) gives a row other bits than among `MOST_ROWS` rows."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    x = torch.randn(MOST_ROWS, shape[1], generator=generator).to(dtype)
    linear = Linear(pack(weight, None), ops)
    whole = linear(x)
    return [n for n in ROW_COUNTS if not torch.equal(linear(x[:n].clone()), whole[:n])]
