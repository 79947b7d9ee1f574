"""The records between the stages of a step. Columns, not objects: a step over 1,024 rows builds none per row."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from batchinfer.core.request import RowError
from batchinfer.core.sequences import Sequence


@dataclass(frozen=True, slots=True)
class Join:
    """A waiting sequence that may enter, with at most `num_tokens` computed in this step."""

    seq: Sequence
    num_tokens: int


@dataclass(slots=True)
class Schedule:
    """Scheduler to memory: up to this much, in this order. Victims of preemption go from the end of `slots`."""

    slots: np.ndarray  # int32 [S], running slots, oldest admission first
    num_tokens: np.ndarray  # int32 [S], 0 where the budget ran out
    joins: list[Join]


@dataclass(slots=True)
class Plan:
    """Memory to everyone: exactly this. One span per slot, `start` is the slot's `num_computed`."""

    slots: np.ndarray  # int32 [S]
    start: np.ndarray  # int32 [S]
    num_tokens: np.ndarray  # int32 [S], at least 1
    samples: np.ndarray  # bool [S]: the span reaches the sequence's last token
    preempted: list[Sequence] = field(default_factory=list)
    deferred: list[Sequence] = field(default_factory=list)

    def part(self, which: np.ndarray) -> Plan:
        """The spans at `which` (indices or mask), as a plan that admits and preempts nobody."""
        return Plan(self.slots[which], self.start[which], self.num_tokens[which], self.samples[which])


@dataclass(slots=True)
class Drafts:
    """Guessed tokens to verify in this step; none unless a proposer is built in."""

    num_tokens: int = 0


@dataclass(slots=True)
class StepResult:
    """The step's one transfer from the device: the sampled token of each sampling span, int32 [R].

    `failures` are slots of the plan that cannot go on, and why; `postponed` slots were not computed after all. The
    tokens of either, where they have any, mean nothing.
    """

    token_ids: np.ndarray
    failures: dict[int, RowError] = field(default_factory=dict)
    postponed: tuple[int, ...] = ()
