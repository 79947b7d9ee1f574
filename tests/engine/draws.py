"""Small conveniences to put logits through a sampler as a head does, and an exact account of what it should draw."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from batchinfer.ops.draw import Drawn, Sampler, SamplingColumns
from batchinfer.ops.native.library import load_native
from batchinfer.ops.native.sampling import NativeSampler
from batchinfer.ops.rows import Product, ScaledRows
from batchinfer.runtime.noise import LARGEST_BELOW_1, _mix, row_keys
from batchinfer.runtime.sampler import TorchSampler

NATIVE = load_native()
KINDS = ["torch"] + (["native"] if NATIVE.library is not None else [])


def sampler(kind: str, vocab_size: int) -> Sampler:
    if kind == "torch":
        return TorchSampler(torch.device("cpu"), vocab_size)
    assert NATIVE.library is not None
    return NativeSampler(NATIVE.library, vocab_size)


def columns(
    rows: int, *, vocab: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, first: int = 0
) -> SamplingColumns:
    """The same parameters for every row; rows are at positions `first` and on."""

    def full(value: float, dtype: Any) -> np.ndarray:
        return np.full(rows, value, dtype)

    keys = row_keys(np.full(rows, 1234, np.uint64), np.arange(first, first + rows))
    k = vocab if top_k <= 0 else min(top_k, vocab)
    return SamplingColumns(full(temperature, np.float32), full(k, np.int32), full(top_p, np.float32), full(min_p, np.float32), keys)


def put(of: Sampler, logits: Product, asked: SamplingColumns, widths: Sequence[int] = (), rounded: bool = False) -> Drawn:
    """Draw from logits [R, V], given in slices of these widths and a rest."""
    draw = of.begin(asked, rounded)
    values = logits if isinstance(logits, torch.Tensor) else logits.values
    starts = [0, *np.cumsum(widths, dtype=int).tolist(), values.shape[1]]
    for start, end in pairwise(starts):
        part = values[:, start:end].contiguous()
        draw.take(start, part if isinstance(logits, torch.Tensor) else ScaledRows(part, logits.scale, None))
    return draw.finish()


def exact_noise(keys: np.ndarray, vocab_size: int) -> np.ndarray:
    """Gumbel noise float64 [R, V] of the sampler's own uniform numbers."""
    h = _mix((torch.arange(vocab_size, dtype=torch.int32) * -1640531527) ^ torch.from_numpy(keys[:, :1]))
    h = _mix(h + torch.from_numpy(keys[:, 1:]))
    u = ((h >> 1) & 0x7FFFFFFF).float().add(0.5).mul(2.0**-31).clamp(max=LARGEST_BELOW_1).numpy().astype(np.float64)
    return -np.log(-np.log1p(-u))


def kept_by_sorting(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Token ids that the filters keep of scaled logits [V]: one stable sort, exact sums in float64."""
    order = np.argsort(-scaled, kind="stable")
    mass = np.exp((scaled[order] - scaled[order[0]]).astype(np.float64)).astype(np.float32).astype(np.float64)
    rank = np.arange(len(order))
    mass = np.where(rank < top_k, mass, 0.0)
    before = np.cumsum(mass) - mass
    keep = (rank < top_k) & ((before < float(np.float32(top_p)) * mass.sum()) | (top_p >= 1)) & (mass >= np.float32(min_p))
    keep[0] = True
    return order[keep & np.isfinite(scaled[order])]
