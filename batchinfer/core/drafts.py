"""Guessing tokens ahead of the model, to verify several in one forward pass."""

from __future__ import annotations

from typing import Protocol

from batchinfer.core.plan import Drafts, Plan


class DraftProposer(Protocol):
    """Proposes tokens for the spans of a plan."""

    def propose(self, plan: Plan) -> Drafts:
        """Guesses for this step."""


class NoDrafts:
    """Never guesses: one token per row and step."""

    def __init__(self) -> None:
        self._none = Drafts()

    def propose(self, plan: Plan) -> Drafts:
        """No guesses."""
        return self._none
