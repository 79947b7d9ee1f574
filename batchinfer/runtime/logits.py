"""What changes logits between the head and the sampler, slice by slice.

An `Editor` knows which rows ask for something and gives, for the logit rows of a step, the edits that they need. With
drafts a row has several logit rows in one step: `places[i]` is the place in the sequence that the token of logit row i
would take, and what stands before it is exactly `table.tokens[slot, :places[i]]`, drafts included. An edit that depends
on what was said is computed from that and nothing else, so that neither batching nor guessing can change it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from batchinfer.core.memory import Lifecycle
from batchinfer.core.request import SamplingParams
from batchinfer.core.sequences import Sequence, SequenceTable
from batchinfer.ops.rows import Product, to_dense

_NO_ROWS = np.empty(0, np.int64)


class LogitEdit(Protocol):
    """A change to some of a step's logit rows."""

    moved: np.ndarray  # int64, rows with logits that become other finite ones: ties among these are real

    def touches(self, first_id: int, width: int) -> bool:
        """Whether any logit of the `width` tokens from `first_id` on changes."""

    def change(self, first_id: int, logits: Tensor) -> None:
        """Change the logits float32 [R, width] of tokens `first_id` and on, in place."""


class Editor(Lifecycle, Protocol):
    """A feature that changes logits. A `Lifecycle` of the memory's: it hears which rows come and go."""

    def edits(self, slots: np.ndarray, places: np.ndarray) -> tuple[LogitEdit, ...]:
        """What the logit rows need that fill `places` int [R] of `slots` int64 [R]; nothing where no row asks for it."""


class AskingSlots:
    """The slots whose rows ask for a feature: a step without any costs a look at one number."""

    def __init__(self, num_slots: int) -> None:
        self._asks = np.zeros(num_slots, bool)
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    def add(self, slot: int) -> None:
        """The slot's new row asks for it."""
        assert not self._asks[slot]
        self._asks[slot] = True
        self._count += 1

    def drop(self, slots: np.ndarray) -> np.ndarray:
        """These slots are freed; returns those of them that asked."""
        if not self._count:
            return slots[:0]
        gone: np.ndarray = slots[self._asks[slots]]
        self._asks[gone] = False
        self._count -= len(gone)
        return gone

    def among(self, slots: np.ndarray) -> np.ndarray:
        """Indices int64 of the slots that ask."""
        return np.flatnonzero(self._asks[slots]) if self._count else _NO_ROWS


def apply_edits(edits: list[LogitEdit], first_id: int, logits: Product) -> Product:
    """The logits [R, N] of tokens `first_id` and on as the sampler shall see them.

    A slice that no edit touches passes as it is; another comes back as plain float32 rows of its own, every logit that
    is not changed as the sampler would read it.
    """
    width = (logits if isinstance(logits, Tensor) else logits.values).shape[1]
    touching = [edit for edit in edits if edit.touches(first_id, width)]
    if not touching:
        return logits
    dense = to_dense(logits, torch.float32).to(torch.float32, copy=True)
    for edit in touching:
        edit.change(first_id, dense)
    return dense


class Pairs:
    """(row, token id) pairs, at hand slice by slice."""

    def __init__(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """int [N] each, in any order."""
        self.order = np.argsort(token_ids, kind="stable")
        self._ids = token_ids[self.order].astype(np.int64)
        self._rows = rows[self.order].astype(np.int64)

    def within(self, first_id: int, width: int) -> slice:
        """Which of the pairs, ordered by token id, lie among the tokens from `first_id` on."""
        start, end = np.searchsorted(self._ids, (first_id, first_id + width)).tolist()
        return slice(start, end)

    def any_within(self, first_id: int, width: int) -> bool:
        """Whether any pair lies among them."""
        which = self.within(first_id, width)
        return bool(which.start < which.stop)

    def places(self, which: slice, first_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows and columns int64 of pairs within the logits of tokens `first_id` and on."""
        return torch.from_numpy(self._rows[which]).to(device), torch.from_numpy(self._ids[which] - first_id).to(device)


class Ban:
    """Tokens that a row may not say: their logits become -infinity."""

    def __init__(self, rows: np.ndarray, banned_ids: list[list[int]]) -> None:
        """`banned_ids[i]` are the ids that rows[i] may not say."""
        ids = np.array([i for ids in banned_ids for i in ids], np.int64)
        self._pairs = Pairs(np.repeat(rows, [len(ids) for ids in banned_ids]), ids)
        self.moved = _NO_ROWS

    def touches(self, first_id: int, width: int) -> bool:
        """True for slices with a banned token."""
        return self._pairs.any_within(first_id, width)

    def change(self, first_id: int, logits: Tensor) -> None:
        """Write -infinity."""
        which = self._pairs.within(first_id, logits.shape[1])
        logits[self._pairs.places(which, first_id, logits.device)] = -torch.inf


class MinTokens:
    """Bans EOS and stop ids where `min_tokens` is not reached at the place to fill."""

    def __init__(self, table: SequenceTable, eos_ids: list[int], stop_ids: Callable[[SamplingParams], tuple[int, ...]]) -> None:
        self._eos_ids = eos_ids
        self._table = table
        self._stop_ids = stop_ids
        self._asking = AskingSlots(table.num_slots)

    def admit(self, seq: Sequence) -> None:
        """Note rows with a least length."""
        if seq.request.params.min_tokens:
            self._asking.add(seq.slot)

    def forget(self, slots: np.ndarray) -> None:
        """These rows leave."""
        self._asking.drop(slots)

    def edits(self, slots: np.ndarray, places: np.ndarray) -> tuple[LogitEdit, ...]:
        """A ban for the rows that are too short to end."""
        if not self._asking:
            return ()
        table = self._table
        early = np.flatnonzero(places < table.min_end[slots])
        if not len(early):
            return ()
        banned = []
        for row in early.tolist():
            seq = table.sequences[slots[row]]
            assert seq is not None
            params = seq.request.params
            banned.append([*self._stop_ids(params), *([] if params.ignore_eos else self._eos_ids)])
        return (Ban(early, banned),)
