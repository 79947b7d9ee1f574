"""From slices of logits to one token per row: greedy, or temperature, top-k, top-p and min-p with position-keyed noise.

The torch sampler: for any device, and the oracle of the native one. Every decision about a row uses its own logits
only, in an order that does not depend on other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchinfer.core.sequences import SequenceTable
from batchinfer.ops.draw import Draw, Drawn, Sampler, SamplingColumns
from batchinfer.ops.native.sampling import NativeSampler
from batchinfer.ops.rows import Product, to_dense
from batchinfer.ops.table import Choice
from batchinfer.runtime.device import ComputeTarget
from batchinfer.runtime.noise import gumbel, row_keys
from batchinfer.runtime.ties import NoTies, TiedIds

CANDIDATES = 1024  # most likely tokens looked at first; the same for every row, so that ties fall alike
NOISE_ROWS = 32  # rows of noise made at a time: their temporaries stay in the cache


def choose_sampler(target: ComputeTarget, vocab_size: int) -> tuple[Sampler, Choice]:
    """The native sampler where the native library serves, else the torch one; says why."""
    fused = target.fused
    if fused.library is None:
        return TorchSampler(target.device, vocab_size), Choice("sampling", "reference", fused.reason)
    return NativeSampler(fused.library, vocab_size), Choice("sampling", "native", fused.reason)


def gather_columns(table: SequenceTable, slots: np.ndarray, places: np.ndarray, vocab_size: int) -> SamplingColumns:
    """Columns of the slots int64 [R], with the noise keys of the positions that they are about to fill, int32 [R]."""
    top_k = table.top_k[slots]
    return SamplingColumns(
        temperature=table.temperature[slots],
        top_k=np.where((top_k <= 0) | (top_k > vocab_size), np.int32(vocab_size), top_k),
        top_p=table.top_p[slots],
        min_p=table.min_p[slots],
        keys=row_keys(table.seed[slots], places),
    )


class TorchSampler:
    """Plain torch operations on the device of the logits."""

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._device = device

    def begin(self, columns: SamplingColumns, rounded: bool = False) -> Draw:
        """Start on a step's rows."""
        greedy = columns.temperature <= 0
        tied = TiedIds(torch.from_numpy(greedy).to(self._device)) if rounded and greedy.any() else NoTies()
        return _TorchDraw(columns, tied, self._device, self.vocab_size)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some of a step's rows with their columns as tensors."""

    index: Tensor  # int64 [N], of the step's rows
    temperature: Tensor  # float32 [N, 1]
    top_k: Tensor  # int64 [N, 1]
    top_p: Tensor  # float32 [N, 1]
    min_p: Tensor  # float32 [N, 1]
    keys: Tensor  # int32 [N, 2]

    @classmethod
    def of(cls, columns: SamplingColumns, index: np.ndarray, device: torch.device) -> _Rows:
        def column(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values[index][:, None]).to(device)

        keys = torch.from_numpy(columns.keys[index]).to(device)
        where = torch.from_numpy(index).to(device)
        return cls(where, column(columns.temperature), column(columns.top_k).long(), column(columns.top_p), column(columns.min_p), keys)

    def part(self, which: Tensor | slice) -> _Rows:
        return _Rows(*(getattr(self, name)[which] for name in self.__dataclass_fields__))


class _TorchDraw:
    """The largest so far of every row, with and without noise, and all logits of rows that filter."""

    def __init__(self, columns: SamplingColumns, tied: TiedIds | NoTies, device: torch.device, vocab_size: int) -> None:
        self._tied = tied
        filtered = columns.filtered(vocab_size)
        free = np.setdiff1d(np.flatnonzero(columns.temperature > 0), filtered, assume_unique=True)
        self._vocab_size = vocab_size
        self._free, self._filtered = _Rows.of(columns, free, device), _Rows.of(columns, filtered, device)
        self._best = torch.full((len(columns.temperature),), -torch.inf, device=device)
        self._best_id = torch.zeros(len(columns.temperature), dtype=torch.int64, device=device)
        self._noisy = torch.full((len(free),), -torch.inf, device=device)
        self._noisy_id = torch.zeros(len(free), dtype=torch.int64, device=device)
        self._kept = torch.empty(len(filtered), vocab_size, device=device)

    def take(self, first_id: int, logits: Product) -> None:
        """Update every row's best, or keep its logits."""
        wide = to_dense(logits, torch.float32).float()[:, : max(0, self._vocab_size - first_id)]
        if not wide.shape[1]:
            return
        largest = wide.amax(1)
        better = (largest > self._best).nonzero().squeeze(1)  # few after the first slices: finding a place is slow
        if len(better):
            self._best_id[better] = first_id + wide[better].max(1).indices
        self._best = torch.maximum(self._best, largest)  # stays NaN once it is
        self._tied.take(first_id, wide, largest, self._best)
        if len(self._filtered.index):
            self._kept[:, first_id : first_id + wide.shape[1]] = wide[self._filtered.index] / self._filtered.temperature
        token_ids = torch.arange(first_id, first_id + wide.shape[1], dtype=torch.int32, device=wide.device)
        for start in range(0, len(self._free.index), NOISE_ROWS):
            rows = slice(start, start + NOISE_ROWS)
            part = self._free.part(rows)
            noisy, place = (wide[part.index] / part.temperature + gumbel(part.keys, token_ids)).max(1)
            better = noisy > self._noisy[rows]
            self._noisy_id[rows] = torch.where(better, first_id + place, self._noisy_id[rows])
            self._noisy[rows] = torch.where(better, noisy, self._noisy[rows])

    def finish(self) -> Drawn:
        """Choose among the kept logits, and gather."""
        sound = torch.isfinite(self._best)  # not so if any logit is NaN or +inf, or all are -inf
        token_ids = self._best_id
        token_ids[self._free.index] = self._noisy_id
        if len(self._filtered.index):
            fit = sound[self._filtered.index]
            rows = self._filtered.part(fit)
            token_ids[rows.index] = _choose_filtered(self._kept[fit], rows)
        return Drawn(token_ids.to("cpu", torch.int32).numpy(), sound.cpu().numpy(), self._tied.finish(self._best))


def _choose_filtered(scaled: Tensor, rows: _Rows) -> Tensor:
    """Token ids int64 [N] for scaled logits [N, V].

    Looks at the most likely candidates; rows whose kept set may reach beyond them are sorted whole.
    """
    vocab_size = scaled.shape[1]
    if vocab_size <= CANDIDATES:
        return _choose_sorted(scaled, _total(scaled), rows)
    total = _total(scaled)
    top = scaled.topk(CANDIDATES, dim=-1)
    by_id, order = top.indices.sort(dim=-1)  # topk leaves equals in any order
    values, place = top.values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    token_ids = by_id.gather(1, place)
    # Enough when the cut lies above the last candidate and its equals, judged row by row. But top-p within a wider top-k
    # needs the mass of that, which only the whole sort gives.
    keep = _kept(values, total, rows)
    reaches = (keep & (values == values[:, -1:])).any(-1, keepdim=True)
    wide = (rows.top_k > CANDIDATES) & (rows.top_k < vocab_size) & (rows.top_p < 1.0)
    out = _choose(values, token_ids, keep, rows)
    rest = (reaches | wide).squeeze(1).nonzero().squeeze(1)
    if len(rest):
        out[rest] = _choose_sorted(scaled[rest], total[rest], rows.part(rest))
    return out


def _choose_sorted(scaled: Tensor, total: Tensor, rows: _Rows) -> Tensor:
    values, token_ids = scaled.sort(dim=-1, descending=True, stable=True)
    return _choose(values, token_ids, _kept(values, total, rows), rows)


def _mass(scaled: Tensor, largest: Tensor) -> Tensor:
    """Likelihood relative to the most likely token: equal logits weigh exactly the same."""
    return (scaled - largest).exp()


def _total(scaled: Tensor) -> Tensor:
    """Mass of the whole vocabulary, float64 [N, 1]."""
    return _mass(scaled, scaled.amax(-1, keepdim=True)).double().sum(-1, keepdim=True)


def _choose(values: Tensor, token_ids: Tensor, keep: Tensor, rows: _Rows) -> Tensor:
    """Of what is kept of the candidates (values, ids [R, K]) the largest with noise."""
    noisy = values + gumbel(rows.keys, token_ids.to(torch.int32))
    best = noisy.masked_fill(~keep, -torch.inf).argmax(-1, keepdim=True)
    return token_ids.gather(1, best).squeeze(1)


def _kept(values: Tensor, total: Tensor, rows: _Rows) -> Tensor:
    """Which of the candidates, in descending order [R, K], the filters keep.

    top-k first, top-p within what it keeps (the token that crosses the threshold stays), then min-p relative to the
    most likely token. Sums are in float64. `total` is the mass of the whole vocabulary.
    """
    rank = torch.arange(values.shape[1], device=values.device)
    in_top_k = rank < rows.top_k
    mass = _mass(values, values[:, :1]).masked_fill(~in_top_k, 0.0)
    upto = mass.double().cumsum(-1)
    whole = torch.where(rows.top_k <= values.shape[1], upto[:, -1:], total)
    keep = (upto - mass < rows.top_p.double() * whole) | (rows.top_p >= 1.0)
    keep &= in_top_k & (mass >= rows.min_p)
    keep[:, 0] = True
    return keep
