"""Rows that make tokens less likely because they stand in the text already.

`repetition_penalty` looks at prompt and answer, divides positive logits and multiplies negative ones (Keskar et al.
2019, "CTRL"); `frequency_penalty` and `presence_penalty` look at the answer alone and are subtracted, once for each
occurrence and once (OpenAI's API). They apply in this order. What a row has said is kept as its distinct tokens with
their counts, so that a step adds one token to each row instead of counting its whole text again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchinfer.core.request import SamplingParams
from batchinfer.core.sequences import Sequence, SequenceTable
from batchinfer.runtime.logits import AskingSlots, LogitEdit, Pairs

FIRST_WIDTH = 256  # distinct tokens that a row has room for at first


@dataclass(slots=True)
class Tallies:
    """Distinct tokens of some rows, and how often each stands in the answer."""

    token_ids: np.ndarray  # int32 [N, W]; -1 where there is none
    counts: np.ndarray  # int32 [N, W]
    size: np.ndarray  # int32 [N], distinct tokens of the row

    @classmethod
    def empty(cls, rows: int, width: int) -> Tallies:
        """No tokens."""
        return cls(np.full((rows, width), -1, np.int32), np.zeros((rows, width), np.int32), np.zeros(rows, np.int32))

    def widened(self, width: int) -> Tallies:
        """With room for `width` distinct tokens a row, at least twice as many as before."""
        more = max(width - self.token_ids.shape[1], self.token_ids.shape[1])
        pad = ((0, 0), (0, more))
        return Tallies(np.pad(self.token_ids, pad, constant_values=-1), np.pad(self.counts, pad), self.size)

    def taken(self, rows: np.ndarray, spare: int) -> Tallies:
        """A copy of some rows, cut to the widest of them and `spare` more."""
        width = int(self.size[rows].max(initial=0)) + spare
        part = Tallies(self.token_ids[rows, :width], self.counts[rows, :width], self.size[rows])
        return part if width <= self.token_ids.shape[1] else part.widened(width)

    def add(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Count one more token of the answer for each of the (distinct) rows; there is room for it."""
        found = self.token_ids[rows] == token_ids[:, None]
        known = found.any(1)
        column = np.where(known, found.argmax(1), self.size[rows])
        self.token_ids[rows, column] = token_ids
        self.counts[rows, column] += 1
        self.size[rows] += ~known


class Penalty:
    """Lowers the logits of tokens that stand in the rows' texts."""

    def __init__(self, rows: np.ndarray, tallies: Tallies, strengths: np.ndarray) -> None:
        """`strengths` float32 [N, 3] of rows int64 [N]: repetition, frequency and presence penalty."""
        held = np.arange(tallies.token_ids.shape[1]) < tallies.size[:, None]
        of = np.repeat(np.arange(len(rows)), tallies.size)
        self._pairs = Pairs(rows[of], tallies.token_ids[held])
        order = self._pairs.order
        self._counts = tallies.counts[held][order].astype(np.float32)
        self._strengths = strengths[of[order]]
        self.moved = rows

    def touches(self, first_id: int, width: int) -> bool:
        """True for slices with a token that was said."""
        return self._pairs.any_within(first_id, width)

    def change(self, first_id: int, logits: Tensor) -> None:
        """Divide or multiply, then subtract."""
        which = self._pairs.within(first_id, logits.shape[1])
        where = self._pairs.places(which, first_id, logits.device)
        repetition, frequency, presence = torch.from_numpy(self._strengths[which]).to(logits.device).unbind(1)
        counts = torch.from_numpy(self._counts[which]).to(logits.device)
        x = logits[where]
        x = torch.where(x > 0, x / repetition, x * repetition)
        logits[where] = x - frequency * counts - presence * (counts > 0)


class Penalties:
    """Rows with any of the three penalties."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._asking = AskingSlots(table.num_slots)
        self._strengths = np.zeros((table.num_slots, 3), np.float32)
        self._place = np.zeros(table.num_slots, np.int32)  # of a slot's tally
        self._free: list[int] = []
        self._tallies = Tallies.empty(0, FIRST_WIDTH)
        self._counted = np.zeros(table.num_slots, np.int32)  # tokens of the slot's text that are in its tally

    def admit(self, seq: Sequence) -> None:
        """Count what stands there already: the prompt, and what was said before a preemption."""
        params, slot, table = seq.request.params, seq.slot, self._table
        if not asks(params):
            return
        self._asking.add(slot)
        self._strengths[slot] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        if not self._free:
            self._make_room()
        place = self._place[slot] = self._free.pop()
        num_prompt, num_tokens = int(table.num_prompt[slot]), int(table.num_tokens[slot])
        first = 0 if params.repetition_penalty != 1 else num_prompt  # the other two never look at the prompt
        ids = np.unique(table.tokens[slot, first:num_tokens])
        if len(ids) > self._tallies.token_ids.shape[1]:
            self._tallies = self._tallies.widened(len(ids))
        tallies = self._tallies
        tallies.token_ids[place], tallies.counts[place], tallies.size[place] = -1, 0, len(ids)
        tallies.token_ids[place, : len(ids)] = ids
        said = np.searchsorted(ids, table.tokens[slot, num_prompt:num_tokens])
        tallies.counts[place, : len(ids)] = np.bincount(said, minlength=len(ids))
        self._counted[slot] = num_tokens

    def forget(self, slots: np.ndarray) -> None:
        """These rows leave."""
        self._free.extend(self._place[self._asking.drop(slots)].tolist())

    def edits(self, slots: np.ndarray, places: np.ndarray) -> tuple[LogitEdit, ...]:
        """Penalties by what stands before each place, guesses included."""
        rows = self._asking.among(slots)
        if not len(rows):
            return ()
        who, places = slots[rows], places[rows]
        self._count_new(np.unique(who))
        guessed = places - self._counted[who]
        tallies = self._tallies.taken(self._place[who], int(guessed.max()))
        for offset in range(int(guessed.max())):
            deeper = np.flatnonzero(guessed > offset)
            tallies.add(deeper, self._table.tokens[who[deeper], self._counted[who[deeper]] + offset])
        return (Penalty(rows, tallies, self._strengths[who]),)

    def _count_new(self, slots: np.ndarray) -> None:
        """Count the tokens that became part of the answers since."""
        ends = self._table.num_tokens[slots]
        while True:
            late = np.flatnonzero(self._counted[slots] < ends)
            if not len(late):
                return
            who = slots[late]
            places = self._place[who]
            if int(self._tallies.size[places].max()) >= self._tallies.token_ids.shape[1]:
                self._tallies = self._tallies.widened(0)
            self._tallies.add(places, self._table.tokens[who, self._counted[who]])
            self._counted[who] += 1

    def _make_room(self) -> None:
        old = self._tallies
        rows, width = old.token_ids.shape
        more = Tallies.empty(min(max(rows, 8), self._table.num_slots - rows), width)
        self._free = list(range(rows + len(more.size) - 1, rows - 1, -1))
        joined = (np.concatenate(pair) for pair in ((old.token_ids, more.token_ids), (old.counts, more.counts), (old.size, more.size)))
        self._tallies = Tallies(*joined)


def asks(params: SamplingParams) -> bool:
    """Whether a row has any penalty."""
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
