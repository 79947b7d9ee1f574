"""Guesses from a second, smaller model with the same tokenizer.

Its keys and values lie in blocks of the same ids as the model's own, so one block table serves both. It guesses with
the noise of the places that it fills: where both models' distributions agree, so do the tokens that they draw.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from batchinfer.core.acceptance import Acceptance
from batchinfer.core.draft_length import DraftDepth, StepLoad
from batchinfer.core.ngram import room_for_drafts
from batchinfer.core.plan import Drafts, Plan
from batchinfer.core.sequences import Sequence, SequenceTable
from batchinfer.runtime.data_plane import DataPlane

_ALL = np.zeros(1, np.int64)  # the only kind of guess


class DraftModelProposer:
    """Keeps the draft model's keys and values in step with the rows, and lets it guess.

    Prompts are read as the model reads them, so that their blocks can be shared at once; answers are caught up with
    when the row is drafted for. `table.num_filled` tells what both models have.
    """

    def __init__(self, table: SequenceTable, plane: DataPlane, block_size: int, budget: int, depth: DraftDepth) -> None:
        self.acceptance = Acceptance(table.num_slots, 1)
        self._table = table
        self._plane = plane
        self._block_size = block_size
        self._budget = budget
        self._depth = depth
        self._filled = np.zeros(table.num_slots, np.int32)
        table.num_filled = self._filled

    def admit(self, seq: Sequence) -> None:
        """The blocks that the prefix cache gave hold the draft model's part, too."""
        self._filled[seq.slot] = self._table.num_computed[seq.slot]

    def forget(self, slots: np.ndarray) -> None:
        """Slots start afresh."""

    def propose(self, plan: Plan) -> Drafts:
        """Let the draft model read what is new, and guess as many tokens as pay."""
        table, slots = self._table, plan.slots
        ends = plan.start + plan.num_tokens
        behind = np.maximum(ends - self._filled[slots], 0)
        room = np.where(plan.samples & (behind > 0), room_for_drafts(table, slots, self._block_size), 0)
        depth = self._choose_depth(plan, behind, room)
        wanted = np.clip(room, 0, depth).astype(np.int32)
        read = (behind > 0) & ((wanted > 0) | (self._filled[slots] < table.num_prompt[slots]))
        if not read.any():
            return Drafts.none(len(slots))
        first = self._guess(Plan(slots[read], self._filled[slots[read]], behind[read], (wanted > 0)[read]))
        self._filled[slots[read]] = ends[read]
        if not depth:
            return Drafts.none(len(slots))
        guesses = np.zeros((len(slots), depth), np.int32)
        guesses[wanted > 0, 0] = first
        for place in range(1, depth):
            who = np.flatnonzero(wanted > place)
            if not len(who):
                break
            at = ends[who] + place - 1
            table.tokens[slots[who], at] = guesses[who, place - 1]
            guesses[who, place] = self._guess(Plan(slots[who], at, np.ones(len(who), np.int32), np.ones(len(who), bool)))
        return Drafts(wanted, guesses[np.arange(depth) < wanted[:, None]])

    def learn(self, plan: Plan, drafts: Drafts, accepted: np.ndarray) -> None:
        """Count, and keep what the draft model read of its own guesses where they were right."""
        drafted = drafts.counts > 0
        slots, counts, right = plan.slots[drafted], drafts.counts[drafted], accepted[drafted]
        self._filled[slots] = (plan.start + plan.num_tokens)[drafted] + np.minimum(right, counts - 1)
        self.acceptance.count(slots, _ALL.repeat(len(slots)), counts, right)

    def _choose_depth(self, plan: Plan, behind: np.ndarray, room: np.ndarray) -> int:
        rows = np.flatnonzero(room > 0)
        unread = int(behind[rows].sum())
        load = StepLoad.of(plan, self._budget)
        depth = self._depth.choose(float(self.acceptance.common()[0]), load, len(rows), unread) if unread <= self._budget else 0
        if not depth:
            self.acceptance.fade(plan.slots[rows])
        return depth

    def _guess(self, plan: Plan) -> np.ndarray:
        batch: Any = self._plane.batcher.build(plan, Drafts.none(len(plan.slots)))
        return self._plane.head.decide(self._plane.runner.forward(batch), batch).token_ids
