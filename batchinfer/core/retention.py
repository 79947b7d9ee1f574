"""What becomes of a step's keys and values once its tokens are known."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from batchinfer.core.memory import KVMemory
from batchinfer.core.sequences import SequenceTable


class Retention(Protocol):
    """Decides what outlives a step."""

    def step_ended(self, slots: np.ndarray) -> None:
        """These running slots were computed, their new tokens are appended, and what they offer to others is published."""


class KeepKV:
    """The KV cache: what is computed once is never computed again."""

    def step_ended(self, slots: np.ndarray) -> None:
        """Everything stays."""


class RecomputeAll:
    """No KV cache: blocks are scratch for one step, and the next one computes the whole sequence again."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory

    def step_ended(self, slots: np.ndarray) -> None:
        """Nothing counts as computed, and the blocks go back to the pool."""
        _forget(self._memory.table, slots)
        self._memory.give_back(slots)


class RecomputeInPlace:
    """The same in memory that is not paged, where a request's slab is its own from start to end."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table

    def step_ended(self, slots: np.ndarray) -> None:
        """Nothing counts as computed."""
        _forget(self._table, slots)


def _forget(table: SequenceTable, slots: np.ndarray) -> None:
    table.num_computed[slots] = 0
    table.num_filled[slots] = 0
    table.published[slots] = 0
