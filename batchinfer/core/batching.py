"""Whether rows may join while others run."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from batchinfer.core.sequences import Sequence


class Batching(Protocol):
    """How many rows may join now; hears who joins and who leaves (it is a `Lifecycle` of the memory's)."""

    def room(self, most: int, num_running: int) -> int:
        """Rows that may join in this step, when `most` may run at once."""

    def filled(self) -> None:
        """No further row joined, for want of memory or of rows."""

    def admit(self, seq: Sequence) -> None:
        """The sequence has joined."""

    def forget(self, slots: np.ndarray) -> None:
        """These slots leave."""


class ContinuousBatching:
    """A row joins as soon as there is room for it (Orca's iteration-level scheduling, Yu et al., OSDI 2022)."""

    def room(self, most: int, num_running: int) -> int:
        """As many as are missing."""
        return most - num_running

    def filled(self) -> None:
        """The next step may have room again."""

    def admit(self, seq: Sequence) -> None:
        """Nothing depends on it."""

    def forget(self, slots: np.ndarray) -> None:
        """Nothing depends on it."""


class StaticBatches:
    """One batch after another: rows join until it is full, and then none until all of it have ended.

    It is full with as many rows as may run at once, counting those that ended meanwhile, or when memory or waiting rows
    are used up. A step whose token budget ended first leaves it open.
    """

    def __init__(self) -> None:
        self._joined = 0
        self._full = False

    def room(self, most: int, num_running: int) -> int:
        """What is missing of the batch that forms; none of it is replaced."""
        if not num_running:
            self._joined, self._full = 0, False
        return 0 if self._full else most - self._joined

    def filled(self) -> None:
        """The batch is as large as it gets."""
        self._full = True

    def admit(self, seq: Sequence) -> None:
        """One more of the batch."""
        self._joined += 1

    def forget(self, slots: np.ndarray) -> None:
        """Their places stay empty."""
