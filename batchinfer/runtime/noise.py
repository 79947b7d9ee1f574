"""Noise that belongs to (seed, position, token id) and to nothing else.

A counter-based generator, so that a token's noise is the same at any batch size, slot, order and device. Adding
Gumbel noise to log-probabilities and taking the largest samples from the distribution (Gumbel-max trick).
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

_C1, _C2 = -2048144789, -1028477387  # murmur3's finaliser constants 0x85EBCA6B and 0xC2B2AE35 as int32 (Appleby)
_GOLDEN = -1640531527  # 0x9E3779B9
LARGEST_BELOW_1 = 1.0 - 2.0**-24  # of float32


def row_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Two 32-bit keys per row, int32 [R, 2], from 64-bit seeds and absolute token positions (splitmix64)."""
    with np.errstate(over="ignore"):
        z = seeds.astype(np.uint64) + positions.astype(np.uint64) * np.uint64(0xD1342543DE82EF95) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return np.ascontiguousarray(z).view(np.int32).reshape(-1, 2)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float32 [R, N], for keys int32 [R, 2] and token ids int32 [N] or [R, N]."""
    h = token_ids * _GOLDEN
    h = h ^ keys[:, :1]
    h = _mix(h)
    h += keys[:, 1:]
    h = _mix(h)
    # 31 bits as the chance of a larger draw: small ones, which make large noise, keep all their digits. Never 0 and,
    # since the largest would round to it, never 1: both logarithms are finite.
    u = ((h >> 1) & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=LARGEST_BELOW_1)
    return u.neg_().log1p_().neg_().log_().neg_()


def _mix(h: Tensor) -> Tensor:
    """murmur3's 32-bit finaliser; torch has no logical shift, so the sign bits are masked off."""
    h = h ^ ((h >> 16) & 0xFFFF)
    h *= _C1
    h ^= (h >> 13) & 0x7FFFF
    h *= _C2
    h ^= (h >> 16) & 0xFFFF
    return h
