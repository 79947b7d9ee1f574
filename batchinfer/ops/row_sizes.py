"""Products in numbers of rows at which a library sums alike.

A matrix library may order its sums by the number of rows. Where it does, a batch is cut into pieces of sizes that are
known to agree, and the last piece is padded, so that a row's product never depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def in_row_sizes(product: Callable[..., Tensor], sizes: tuple[int, ...], *of: Tensor) -> Tensor:
    """`product` of one or more `of` [T, ...], called with numbers of rows out of `sizes` (ascending) alone."""
    rows = of[0].shape[0]
    if rows in sizes:
        return product(*of)
    done = []
    for start, end, size in pieces(rows, sizes):
        done.append(product(*(pad_rows(x[start:end], size - (end - start)) for x in of))[: end - start])
    return done[0] if len(done) == 1 else torch.cat(done)


def pieces(rows: int, sizes: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(first row, behind the last row, size to pad to) of each piece: whole ones of the largest size, then the rest."""
    largest = sizes[-1]
    whole = [(start, start + largest, largest) for start in range(0, rows - largest + 1, largest)]
    start = len(whole) * largest
    if start == rows and whole:
        return whole
    return [*whole, (start, rows, next(size for size in sizes if size >= rows - start))]


def pad_rows(x: Tensor, count: int) -> Tensor:
    """x [T, in] with `count` rows of zeros behind it."""
    return F.pad(x, (0, 0, 0, count)) if count else x
