"""The records between the stages of a step. Columns, not objects: a step over 1,024 rows builds none per row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from batchinfer.core.request import RowError
from batchinfer.core.sequences import Sequence

_NO_TOKENS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Join:
    """A waiting sequence that may enter, with at most `num_tokens` computed in this step."""

    seq: Sequence
    num_tokens: int


@dataclass(slots=True)
class Schedule:
    """Scheduler to memory: up to this much, in this order. Victims of preemption go from the end of `slots`."""

    slots: np.ndarray  # int64 [S], running slots, oldest admission first
    num_tokens: np.ndarray  # int32 [S], 0 where the budget ran out
    joins: list[Join]


@dataclass(slots=True)
class Plan:
    """Memory to everyone: exactly this. One span per slot, `start` is the slot's `num_computed`."""

    slots: np.ndarray  # int64 [S]
    start: np.ndarray  # int32 [S]
    num_tokens: np.ndarray  # int32 [S], at least 1
    samples: np.ndarray  # bool [S]: the span reaches the sequence's last token
    num_joined: int = 0  # spans at the end whose sequences enter with this step
    preempted: list[Sequence] = field(default_factory=list)
    deferred: list[Sequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to): blocks to copy before anything is computed

    def part(self, which: np.ndarray) -> Plan:
        """The spans at `which` (indices or mask), as a plan that admits and preempts nobody."""
        return Plan(self.slots[which], self.start[which], self.num_tokens[which], self.samples[which])


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guessed tokens to verify in this step, span by span: they are the rows' next tokens if the model agrees."""

    counts: np.ndarray  # int32 [S], 0 where nothing is guessed: always so for spans that do not sample
    token_ids: np.ndarray  # int32 [sum(counts)]

    @classmethod
    def none(cls, num_spans: int) -> Drafts:
        """No guess for any span."""
        return cls(np.zeros(num_spans, np.int32), _NO_TOKENS)


@dataclass(slots=True)
class StepResult:
    """The step's one transfer from the device: the tokens of each sampling span, one after another.

    A span has one token, and one more for every draft that the model agreed with. `failures` are slots of the plan
    that cannot go on, and why; `postponed` slots were not computed after all. The tokens of either mean nothing.
    """

    token_ids: np.ndarray  # int32 [sum(counts)]
    counts: np.ndarray  # int32 [R], at least 1
    failures: dict[int, RowError] = field(default_factory=dict)
    postponed: tuple[int, ...] = ()

    @classmethod
    def single(cls, token_ids: np.ndarray, failures: dict[int, RowError] | None = None, postponed: tuple[int, ...] = ()) -> StepResult:
        """One token for each sampling span, int32 [R]."""
        return cls(token_ids, np.ones(len(token_ids), np.int32), failures or {}, postponed)

    def part(self, which: np.ndarray) -> StepResult:
        """The spans at `which` (mask [R]), without failures."""
        return StepResult(self.token_ids[np.repeat(which, self.counts)], self.counts[which])

    def waves(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(indices of the sampling spans that have an n-th token, those tokens), for n from the first on."""
        if len(self.token_ids) == len(self.counts):
            yield np.arange(len(self.counts)), self.token_ids
            return
        first = np.cumsum(self.counts) - self.counts
        for n in range(int(self.counts.max())):
            index = np.flatnonzero(self.counts > n)
            yield index, self.token_ids[first[index] + n]
