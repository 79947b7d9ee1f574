"""Rows that repeat themselves: noticed by counting, for every distance, how long a row has been saying what it said before.

A row with `stop_repetition` N has ended when its last N generated tokens are one sequence of at most N/3 tokens over and
over: a piece three times or more. For a distance p that is so once N - p tokens in a row equal the token p before each.
These run lengths are kept for every distance up to N/3, so that a step costs one comparison a distance for each row that
asks, and a row is ended at the same token however its tokens arrive.
"""

from __future__ import annotations

import numpy as np

from batchinfer.core.sequences import Sequence, SequenceTable

REPEATS = 3


class RepetitionWatch:
    """Run lengths of the running rows that asked to be ended when they repeat themselves."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._window = np.zeros(table.num_slots, np.int32)  # N by slot, 0 for rows that did not ask
        self._runs = np.zeros((table.num_slots, 0), np.int32)  # [slot, distance - 1]
        self._num_watched = 0

    def admit(self, seq: Sequence) -> None:
        """Begin with what the row has generated already: nothing, unless it was preempted."""
        window = seq.request.params.stop_repetition
        if not window:
            return
        slot, table = seq.slot, self._table
        self._num_watched += 1
        self._window[slot] = window
        longest = window // REPEATS
        if longest > self._runs.shape[1]:
            grown = np.zeros((len(self._runs), longest), np.int32)
            grown[:, : self._runs.shape[1]] = self._runs
            self._runs = grown
        self._runs[slot] = 0
        output = table.tokens[slot, table.num_prompt[slot] : table.num_tokens[slot]]
        for distance in range(1, min(longest, len(output) - 1) + 1):
            differs = np.flatnonzero(output[distance:] != output[:-distance])
            last = int(differs[-1]) + 1 if len(differs) else 0
            self._runs[slot, distance - 1] = len(output) - distance - last

    def forget(self, slots: np.ndarray) -> None:
        """Stop watching; call before the slots are freed."""
        if self._num_watched:
            self._num_watched -= int(np.count_nonzero(self._window[slots]))
            self._window[slots] = 0

    def check(self, slots: np.ndarray) -> np.ndarray:
        """Which of the slots repeat themselves, each with one token just appended; bool [R]."""
        repeats = np.zeros(len(slots), bool)
        if not self._num_watched:
            return repeats
        who = np.flatnonzero(self._window[slots])
        if not len(who):
            return repeats
        table, watched = self._table, slots[who]
        window = self._window[watched]
        newest = table.num_tokens[watched] - 1
        distances = np.arange(1, int(window.max()) // REPEATS + 1, dtype=np.int32)
        before = newest[:, None] - distances
        inside = before >= table.num_prompt[watched, None]
        same = (table.tokens[watched[:, None], np.maximum(before, 0)] == table.tokens[watched, newest][:, None]) & inside
        runs = np.where(same, self._runs[watched, : len(distances)] + 1, 0)
        self._runs[watched, : len(distances)] = runs
        near = distances <= (window // REPEATS)[:, None]
        repeats[who] = ((runs >= window[:, None] - distances) & near).any(axis=1)
        return repeats
