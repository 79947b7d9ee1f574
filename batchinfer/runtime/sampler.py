"""From logits to one token per row: greedy, or temperature, top-k, top-p and min-p with position-keyed noise.

Every decision about a row uses its own logits only, in an order that does not depend on other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchinfer.core.sequences import SequenceTable
from batchinfer.runtime.noise import gumbel, row_keys

CANDIDATES = 1024  # most likely tokens looked at first; the same for every row, so that ties fall alike
SLICE_ROWS = 8  # rows of noise made at a time: their temporaries stay in the cache


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """The sampling parameters of the rows at hand; one entry per row of the logits."""

    temperature: Tensor  # float32 [R, 1]
    top_p: Tensor  # float32 [R, 1]
    min_p: Tensor  # float32 [R, 1]
    top_k: Tensor  # int64 [R, 1], the vocabulary's size where off
    keys: Tensor  # int32 [R, 2]

    def rows(self, index: Tensor) -> SamplingColumns:
        """The entries of some rows, index int64."""
        return SamplingColumns(self.temperature[index], self.top_p[index], self.min_p[index], self.top_k[index], self.keys[index])


def gather_columns(table: SequenceTable, slots: np.ndarray, vocab_size: int, device: torch.device) -> SamplingColumns:
    """Columns of the slots that sample, with the noise keys of the position each is about to fill."""

    def column(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values[:, None]).to(device)

    top_k = table.top_k[slots].astype(np.int64)
    top_k = np.where((top_k <= 0) | (top_k > vocab_size), vocab_size, top_k)
    keys = row_keys(table.seed[slots], table.num_tokens[slots])
    return SamplingColumns(
        temperature=column(table.temperature[slots]),
        top_p=column(table.top_p[slots]),
        min_p=column(table.min_p[slots]),
        top_k=column(top_k),
        keys=torch.from_numpy(keys).to(device),
    )


def sample(logits: Tensor, columns: SamplingColumns) -> Tensor:
    """Token ids int64 [R] for logits [R, V]; temperatures are above 0."""
    scaled = logits.float() / columns.temperature
    vocab_size = scaled.shape[1]
    filtered = ((columns.top_k < vocab_size) | (columns.top_p < 1.0) | (columns.min_p > 0.0)).squeeze(1)
    out = torch.empty(len(scaled), dtype=torch.int64, device=scaled.device)
    free, picky = (~filtered).nonzero().squeeze(1), filtered.nonzero().squeeze(1)
    if len(free):
        out[free] = _sample_all(scaled[free], columns.keys[free])
    if len(picky):
        out[picky] = _sample_filtered(scaled[picky], columns.rows(picky))
    return out


def _sample_all(scaled: Tensor, keys: Tensor) -> Tensor:
    token_ids = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)
    parts = [
        (scaled[i : i + SLICE_ROWS] + gumbel(keys[i : i + SLICE_ROWS], token_ids)).argmax(-1) for i in range(0, len(scaled), SLICE_ROWS)
    ]
    return torch.cat(parts)


def _sample_filtered(scaled: Tensor, columns: SamplingColumns) -> Tensor:
    """Look at the most likely candidates; rows whose kept set may reach beyond them are sorted whole."""
    vocab_size = scaled.shape[1]
    probabilities = torch.softmax(scaled, dim=-1)
    if vocab_size <= CANDIDATES:
        return _choose(*_sorted(scaled, probabilities), columns)
    top = scaled.topk(CANDIDATES, dim=-1)
    mass = probabilities.gather(1, top.indices)
    # Enough when top-k ends inside, when their mass covers top-p of everything, or when min-p cuts inside; judged row
    # by row. A wider top-k needs its own mass, which only the whole sort gives.
    covered = mass.cumsum(-1)[:, -1:] >= columns.top_p
    cut = mass[:, -1:] < columns.min_p * mass[:, :1]
    wide = (columns.top_k > CANDIDATES) & (columns.top_k < vocab_size)
    enough = ((columns.top_k <= CANDIDATES) | (~wide & (((columns.top_p < 1.0) & covered) | cut))).squeeze(1)
    out = torch.empty(len(scaled), dtype=torch.int64, device=scaled.device)
    few, all_ = enough.nonzero().squeeze(1), (~enough).nonzero().squeeze(1)
    if len(few):
        out[few] = _choose(top.values[few], top.indices[few], mass[few], columns.rows(few))
    if len(all_):
        out[all_] = _choose(*_sorted(scaled[all_], probabilities[all_]), columns.rows(all_))
    return out


def _sorted(scaled: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, token_ids = scaled.sort(dim=-1, descending=True, stable=True)
    return values, token_ids, probabilities.gather(1, token_ids)


def _choose(values: Tensor, token_ids: Tensor, mass: Tensor, columns: SamplingColumns) -> Tensor:
    """Filter candidates in descending order (values, ids, probabilities [R, K]), then take the largest with noise.

    top-k first, top-p within what it keeps (the token that crosses the threshold stays), then min-p relative to the
    most likely token.
    """
    rank = torch.arange(values.shape[1], device=values.device)
    mass = mass.masked_fill(rank >= columns.top_k, 0.0)
    upto = mass.cumsum(-1)
    total = upto[:, -1:]
    keep = (upto - mass < columns.top_p * torch.where(columns.top_k <= values.shape[1], total, torch.ones_like(total))) | (
        columns.top_p >= 1.0
    )
    keep &= rank < columns.top_k
    keep &= mass >= columns.min_p * mass[:, :1]
    keep[:, 0] = True
    noisy = values + gumbel(columns.keys, token_ids.to(torch.int32))
    best = noisy.masked_fill(~keep, -torch.inf).argmax(-1, keepdim=True)
    return token_ids.gather(1, best).squeeze(1)
