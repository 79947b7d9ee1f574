"""Whole sequences in turn: how a step's tokens are shared out when every step computes all of each row that it runs."""

from __future__ import annotations

import numpy as np

from batchinfer.core.sequences import Sequence, SequenceTable


class TakeTurns:
    """A chunk policy that cuts nothing: the rows that have waited longest run, as many as token budget and blocks allow.

    A row longer than the budget runs in a step of its own, when its turn comes. The row that has waited longest always
    runs, and rows that join stand behind those that were there, so that everybody's turn comes.
    """

    def __init__(self, table: SequenceTable, num_blocks: int, block_size: int) -> None:
        self._table = table
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._step = 0
        self._last_turn = np.zeros(table.num_slots, np.int64)  # the step in which a slot ran last

    def admit(self, seq: Sequence) -> None:
        """The sequence runs in the step in which it joins."""
        self._last_turn[seq.slot] = self._step

    def forget(self, slots: np.ndarray) -> None:
        """The next one to take a slot is noted when it joins."""

    def share(self, todo: np.ndarray, budget: int) -> np.ndarray:
        """Each row all or nothing, int32 [S]."""
        self._step += 1
        slots = self._table.running()
        grants = np.zeros(len(todo), np.int32)
        left, blocks = budget, self._num_blocks
        for index in np.argsort(self._last_turn[slots], kind="stable").tolist():
            tokens = int(todo[index])
            needed = -(-tokens // self._block_size)
            if self.grant(tokens, left, left == budget) and needed <= blocks:
                grants[index] = tokens
                left -= tokens
                blocks -= needed
                self._last_turn[slots[index]] = self._step
            if left <= 0:
                break
        return grants

    def grant(self, todo: int, left: int, first: bool) -> int:
        """All or nothing."""
        return todo if todo <= left or first else 0
