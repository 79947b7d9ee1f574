"""Guesses that obey the structures: tokens without an alternative are proposed, forbidden guesses are cut.

Where a grammar leaves one way on, such as a property's name, the tokens are certain: verified together, they save a
step each and cost nothing that computing them one by one would not.
"""

from __future__ import annotations

import numpy as np

from batchinfer.core.drafts import DraftProposer
from batchinfer.core.ngram import room_for_drafts
from batchinfer.core.plan import Drafts, Plan
from batchinfer.core.sequences import SequenceTable
from batchinfer.runtime.constraints import Constraints


class StructuredDrafts:
    """A proposer around another one, whose guesses it keeps where the row has no structure."""

    def __init__(self, inner: DraftProposer, constraints: Constraints, table: SequenceTable, block_size: int, budget: int) -> None:
        self._inner = inner
        self._constraints = constraints
        self._table = table
        self._block_size = block_size
        self._budget = budget
        self._theirs: Drafts | None = None  # what was kept of the other's guesses; None: all of them

    def propose(self, plan: Plan) -> Drafts:
        """The guesses of the step, within its budget of tokens: certain ones first."""
        drafts = self._inner.propose(plan)
        self._theirs = None
        spans = self._constraints.asking.among(plan.slots)
        spans = spans[plan.samples[spans]]
        if not len(spans):
            return drafts
        guesses = np.split(drafts.token_ids, np.cumsum(drafts.counts)[:-1])
        theirs = [guess.tolist() for guess in guesses]
        certain: dict[int, list[int]] = {}
        left = self._budget - int(plan.num_tokens.sum())
        room = room_for_drafts(self._table, plan.slots[spans], self._block_size)
        for span, most in zip(spans.tolist(), room.tolist(), strict=True):
            slot = int(plan.slots[span])
            forced = self._constraints.forced(slot, min(most, left))
            if forced and theirs[span][: len(forced)] != forced:
                certain[span] = forced
                theirs[span] = []
                left -= len(forced)
            else:
                theirs[span] = theirs[span][: self._constraints.legal(slot, theirs[span])]
        for span, guess in enumerate(theirs):
            theirs[span] = guess[: max(left, 0)]
            left -= len(theirs[span])
        self._theirs = _joined(theirs)
        return _joined([certain.get(span, guess) for span, guess in enumerate(theirs)])

    def learn(self, plan: Plan, drafts: Drafts, accepted: np.ndarray) -> None:
        """Tell the other proposer of its own guesses."""
        if self._theirs is None:
            self._inner.learn(plan, drafts, accepted)
        elif len(self._theirs.token_ids):
            self._inner.learn(plan, self._theirs, np.minimum(accepted, self._theirs.counts))


def _joined(guesses: list[list[int]]) -> Drafts:
    counts = np.array([len(guess) for guess in guesses], np.int32)
    return Drafts(counts, np.array([token for guess in guesses for token in guess], np.int32))
