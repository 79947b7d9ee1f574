"""Guessing tokens ahead of the model, to verify several in one forward pass.

A guess is accepted while it equals what the model samples at its place with the noise of that place, so drafts change
how many steps a row takes and never its tokens (Leviathan et al. 2023, "Fast Inference from Transformers via
Speculative Decoding", for guesses that are single tokens).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from batchinfer.core.memory import Lifecycle
from batchinfer.core.plan import Drafts, Plan


class DraftProposer(Protocol):
    """Proposes tokens for the spans of a plan, no more than their blocks have room for, and learns what became of them."""

    def propose(self, plan: Plan) -> Drafts:
        """Guesses for this step."""

    def learn(self, plan: Plan, drafts: Drafts, accepted: np.ndarray) -> None:
        """Of each span's drafts the model agreed with the first `accepted`, int32 [S]; called when there were any."""


class NoDrafts:
    """Never guesses: one token per row and step."""

    def propose(self, plan: Plan) -> Drafts:
        """No guesses."""
        return Drafts.none(len(plan.slots))

    def learn(self, plan: Plan, drafts: Drafts, accepted: np.ndarray) -> None:
        """Nothing to learn."""


def clear_nothing(block_ids: np.ndarray) -> None:
    """For parts that keep nothing in blocks."""


def copy_nothing(copies: list[tuple[int, int]]) -> None:
    """For parts that keep nothing in blocks."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """A proposer and what goes with it: who follows rows for it, the most it guesses, and how its part of blocks is cleared and copied."""

    drafter: DraftProposer
    listeners: tuple[Lifecycle, ...] = ()
    lookahead: int = 0
    clear: Callable[[np.ndarray], None] = clear_nothing
    copy: Callable[[list[tuple[int, int]]], None] = copy_nothing


NO_SPECULATION = Speculation(NoDrafts())  # one token per row and step
