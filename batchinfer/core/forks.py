"""Several answers to one prompt, which is computed once.

The prompt's full blocks are shared through the prefix cache. Its last, partial block is one that every answer goes on
writing to, at the latest when it computes the prompt's last token for its own first one: so an answer that enters gets
a copy of the block as a sibling has it, and computes that one token.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from batchinfer.core.sequences import Sequence, SequenceTable


class Forks(Protocol):
    """Finds the siblings of rows that ask for several answers. A `Lifecycle` of the memory's."""

    def admit(self, seq: Sequence) -> None:
        """The sequence has just been given a slot."""

    def forget(self, slots: np.ndarray) -> None:
        """These slots are about to be freed."""

    def is_pending(self, seq: Sequence) -> bool:
        """Whether a running sibling is about to have the prompt that this one needs."""

    def try_source(self, seq: Sequence, num_cached: int) -> int | None:
        """The block to copy for a sequence that enters with `num_cached` shared blocks; None where none is of use."""


class NoForks:
    """Every sequence computes what the prefix cache does not give it."""

    def admit(self, seq: Sequence) -> None:
        """Nobody follows it."""

    def forget(self, slots: np.ndarray) -> None:
        """Nobody follows them."""

    def is_pending(self, seq: Sequence) -> bool:
        """Nothing to wait for."""
        return False

    def try_source(self, seq: Sequence, num_cached: int) -> int | None:
        """Nothing to copy."""
        return None


class SiblingForks:
    """Follows the running sequences of every row that asks for several answers."""

    def __init__(self, table: SequenceTable, block_size: int) -> None:
        self._table = table
        self._block_size = block_size
        self._slots: dict[int, list[int]] = {}  # seq_id of a row's first sequence -> slots of those that run

    def admit(self, seq: Sequence) -> None:
        """It may be a source from now on."""
        if seq.request.params.n > 1:
            self._slots.setdefault(seq.seq_id - seq.choice, []).append(seq.slot)

    def forget(self, slots: np.ndarray) -> None:
        """They are none any more."""
        if not self._slots:
            return
        for slot in slots.tolist():
            seq = self._table.sequences[slot]
            assert seq is not None
            first = seq.seq_id - seq.choice
            if first in self._slots:
                self._slots[first].remove(slot)
                if not self._slots[first]:
                    del self._slots[first]

    def is_pending(self, seq: Sequence) -> bool:
        """Whether siblings run, and none of them has the prompt yet."""
        slots = self._slots.get(seq.seq_id - seq.choice) if seq.request.params.n > 1 else None
        return slots is not None and not self._ready(slots)

    def try_source(self, seq: Sequence, num_cached: int) -> int | None:
        """The block of a sibling that holds the prompt's tokens behind the shared blocks, all but the last one."""
        slots = self._slots.get(seq.seq_id - seq.choice) if seq.request.params.n > 1 else None
        num_before = len(seq.request.prompt_ids) - 1
        if slots is None or num_before // self._block_size != num_cached or num_before % self._block_size == 0:
            return None
        ready = self._ready(slots)
        return int(self._table.block_table[ready[0], num_cached]) if ready else None

    def _ready(self, slots: list[int]) -> list[int]:
        """Those whose keys and values reach to the prompt's last token."""
        table = self._table
        return [slot for slot in slots if min(table.num_computed[slot], table.num_filled[slot]) >= table.num_prompt[slot] - 1]
