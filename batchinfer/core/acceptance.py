"""How often the model agrees with a guess: counted per row, and per kind of guess over all rows."""

from __future__ import annotations

import numpy as np

from batchinfer.core.sequences import Sequence

ROW_MEMORY = 0.9  # what a row's counts keep at each of its drafts: texts change their character
KIND_MEMORY = 0.995  # of the counts of all rows together
FIRST_GUESS = 0.5  # chance of agreement before anything was counted
WEIGHT = 2.0  # of the common chance, in trials, against a row's own; and of the first guess against the common one
AGEING = 0.998  # what counts keep in a step that had no use for them


class Acceptance:
    """Estimates the chance that the model agrees with one guessed token, given that it agreed with those before it.

    A draft of which `a` tokens were accepted counts as `a` successes and, unless all of it was, one failure. Counts
    fade, so that a row or kind that failed long ago is tried again some day. A memory listener: slots start afresh.
    """

    def __init__(self, num_slots: int, num_kinds: int) -> None:
        self._row_hits = np.zeros(num_slots)
        self._row_trials = np.zeros(num_slots)
        self._kind_hits = np.zeros(num_kinds)
        self._kind_trials = np.zeros(num_kinds)

    def admit(self, seq: Sequence) -> None:
        """The slot has a new row, of which nothing is known."""
        self._row_hits[seq.slot] = self._row_trials[seq.slot] = 0.0

    def forget(self, slots: np.ndarray) -> None:
        """Slots that are freed start afresh when they are given away again."""

    def chances(self, slots: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """Chance of agreement, float64 [N], for guesses of these kinds in these slots."""
        chances: np.ndarray = (self._row_hits[slots] + WEIGHT * self.common()[kinds]) / (self._row_trials[slots] + WEIGHT)
        return chances

    def best_chances(self, slots: np.ndarray) -> np.ndarray:
        """An upper bound of `chances` whatever the kind, float64 [N]."""
        best = float(self.common().max())
        chances: np.ndarray = (self._row_hits[slots] + WEIGHT * best) / (self._row_trials[slots] + WEIGHT)
        return chances

    def common(self) -> np.ndarray:
        """Chance of agreement of each kind over all rows, float64 [kinds]."""
        chances: np.ndarray = (self._kind_hits + WEIGHT * FIRST_GUESS) / (self._kind_trials + WEIGHT)
        return chances

    def count(self, slots: np.ndarray, kinds: np.ndarray, proposed: np.ndarray, accepted: np.ndarray) -> None:
        """Learn from drafts, one per (distinct) slot: int arrays [N], `proposed` at least 1."""
        trials = accepted + (accepted < proposed)
        self._row_hits[slots] = ROW_MEMORY * self._row_hits[slots] + accepted
        self._row_trials[slots] = ROW_MEMORY * self._row_trials[slots] + trials
        size = len(self._kind_hits)
        seen = np.bincount(kinds, minlength=size) > 0
        keep = np.where(seen, KIND_MEMORY, 1.0)
        self._kind_hits = keep * self._kind_hits + np.bincount(kinds, accepted, size)
        self._kind_trials = keep * self._kind_trials + np.bincount(kinds, trials, size)

    def fade(self, slots: np.ndarray) -> None:
        """These rows were not worth a guess in this step: what is known grows old, so that they are tried again some day."""
        self._row_hits[slots] *= AGEING
        self._row_trials[slots] *= AGEING
        self._kind_hits *= AGEING
        self._kind_trials *= AGEING
