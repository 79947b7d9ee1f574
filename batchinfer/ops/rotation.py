"""The rotation that makes rows fit for 8 bits.

A row of activations has a few entries many times as large as the others; on a scale that holds them, little is left of
the rest. A Walsh-Hadamard transform is orthogonal up to a factor and spreads each entry over its whole block, so that the
largest is only some four times the typical one. The weights are transformed at load, and the product stays the same:
(W H / n) (H x) = W x for H H = n (QuaRot, Ashkboos et al., arXiv:2404.00456).
"""

from __future__ import annotations

from functools import cache
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_BLOCK = 64  # 16 and 32 leave a larger error, 128 to 512 no smaller one (SmolLM2-135M)
MULTIPLE = 8  # float32 products treat all rows alike in multiples of 8


def block_size(size: int) -> int:
    """Entries that are transformed together: the largest power of two up to 64 that divides a row."""
    return gcd(size, MOST_BLOCK)


def rotate(x: Tensor) -> Tensor:
    """x [T, N] to float32 [T, N], every block of `block_size(N)` entries transformed, not normalised."""
    n = block_size(x.shape[-1])
    blocks = x.float().reshape(-1, n)
    count = len(blocks)
    if count % MULTIPLE:
        blocks = F.pad(blocks, (0, 0, 0, -count % MULTIPLE))
    return F.linear(blocks, _hadamard(n))[:count].view(x.shape)


@cache
def _hadamard(size: int) -> Tensor:
    """Sylvester's matrix: entry (i, j) is -1 where i and j share an odd number of set bits, else 1."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix
