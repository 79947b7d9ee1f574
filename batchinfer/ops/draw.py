"""The seam between logits and tokens: slices of logits go in, one token a row comes out.

A `Sampler` is chosen once: the native one (ops/native/sampling.py) or the torch one (runtime/sampler.py), which is its
oracle. Both decide about a row from its own logits only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from batchinfer.ops.rows import Product

KEPT_BYTES = 64 << 20  # logits kept at a time for rows that filter; more such rows are computed in parts
MOST_TIES = 16  # ids of a row that are told of its largest rounded logit, the lowest first: two are common, more than three rare


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """What each of a step's rows asks of the sampler; contiguous arrays on the host, one entry per row."""

    temperature: np.ndarray  # float32 [R]; 0 takes the largest logit
    top_k: np.ndarray  # int32 [R], from 1 to the vocabulary's size, which is off
    top_p: np.ndarray  # float32 [R], 1 is off
    min_p: np.ndarray  # float32 [R], 0 is off
    keys: np.ndarray  # int32 [R, 2], of the noise at the position that the row is about to fill

    def part(self, rows: slice) -> SamplingColumns:
        """The entries of some rows."""
        return SamplingColumns(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.keys[rows])

    def filtered(self, vocab_size: int) -> np.ndarray:
        """Indices int64 of the rows that draw from a part of the vocabulary: all their logits are needed at once."""
        filters = (self.top_k < vocab_size) | (self.top_p < 1.0) | (self.min_p > 0.0)
        return np.flatnonzero(filters & (self.temperature > 0))


@dataclass(frozen=True, slots=True)
class Ties:
    """Tokens that share their row's largest logit: pairs (rows[i], token_ids[i]), ascending, none or at least two for a row."""

    rows: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    token_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    logits: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))  # as they were rounded

    def without(self, rows: np.ndarray) -> Ties:
        """The ties of other rows."""
        kept = ~np.isin(self.rows, rows)
        return Ties(self.rows[kept], self.token_ids[kept], self.logits[kept])


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token per row, int32 [R], and whether the row's largest logit was finite, bool [R]; other tokens mean nothing.

    `ties` are those of greedy rows where logits are rounded; until they are settled, such a row has the lowest id of its own.
    """

    token_ids: np.ndarray
    sound: np.ndarray
    ties: Ties = field(default_factory=Ties)


class Draw(Protocol):
    """One step's rows on the way to their tokens."""

    def take(self, first_id: int, logits: Product) -> None:
        """Consume the logits [R, N] of tokens `first_id` and on; slices come in ascending order, each once.

        Logits of ids from the vocabulary's size on are ignored.
        """

    def finish(self) -> Drawn:
        """The tokens, after the last slice."""


class Sampler(Protocol):
    """Makes a `Draw` for every step."""

    vocab_size: int

    def begin(self, columns: SamplingColumns, rounded: bool = False) -> Draw:
        """Start on rows of which at most `max_kept(vocab_size)` filter; `rounded`: equal logits may stem from unequal ones."""


def max_kept(vocab_size: int) -> int:
    """Rows that filter whose logits are kept at a time."""
    return max(1, KEPT_BYTES // (4 * vocab_size))
