"""At which numbers of rows the machine's matrix library sums alike, found by trial once per machine and shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

import torch
from torch import Tensor

from batchinfer.remembered import Known, remembered

FEW_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 47, 48, 63, 65, 100, 129, 191, 192, 256, 511)
MOST_ROWS = 512
STEP = 16  # sizes that are tried: rows of a tile of matrix instructions (AMX), and of a vector of float32
ANCHOR = 64  # the size that others must agree with: a common batch, and served alike by one thread and by several

Product = Callable[[Tensor], Tensor]


def row_sizes(kind: str, product_with: Callable[[Tensor], Product], shape: tuple[int, int], dtype: torch.dtype) -> Known:
    """A tuple of sizes, ascending, at which a product of `shape` (out, in) sums alike; () where that is so at every number of rows.

    `product_with` packs a weight [out, in] and gives its product; `kind` names both. Remembered by machine, torch and threads.
    """
    return _remembered(kind, product_with, shape, dtype, torch.get_num_threads())


@lru_cache(maxsize=256)
def _remembered(kind: str, product_with: Callable[[Tensor], Product], shape: tuple[int, int], dtype: torch.dtype, threads: int) -> Known:
    facts = [kind, torch.__version__, threads, shape, str(dtype), FEW_ROWS, MOST_ROWS, STEP]
    known = remembered("row-sizes", facts, lambda: _try_sizes(product_with, shape, dtype))
    return Known(tuple(known.value), known.measured)


def _try_sizes(product_with: Callable[[Tensor], Product], shape: tuple[int, int], dtype: torch.dtype) -> tuple[int, ...]:
    weight, x = cancelling(shape, MOST_ROWS)
    product, x = product_with(weight.to(dtype)), x.to(dtype)
    expected = torch.cat([product(part) for part in torch.split(x, ANCHOR)])

    def agreeing(sizes: Iterable[int]) -> tuple[int, ...]:
        return tuple(size for size in sizes if torch.equal(product(x[:size]), expected[:size]))

    if agreeing(FEW_ROWS) == FEW_ROWS:
        return ()
    return agreeing(range(STEP, MOST_ROWS + 1, STEP))


def cancelling(shape: tuple[int, int], rows: int) -> tuple[Tensor, Tensor]:
    """A weight [out, in] and rows [rows, in], float32 of few bits, whose products are 0 but for rounding.

    The second half of the inputs is the first in another order, and its weights have the opposite sign. What is left of
    a sum is the error of its order, and rounding the sum to bf16 hides no difference of it.
    """
    generator = torch.Generator().manual_seed(0)
    out, size = shape
    half = size // 2
    order = torch.randperm(half, generator=generator)

    def doubled(count: int, sign: float) -> Tensor:
        first = torch.randn(count, half, generator=generator).bfloat16().float()
        return torch.cat((first, sign * first[:, order], torch.zeros(count, size - 2 * half)), dim=1)

    return doubled(out, -1.0), doubled(rows, 1.0)
