"""Guesses from the row's own text: what followed the last few tokens when they came before.

Prompt lookup decoding (Saxena 2023): no second model, and worth most where answers repeat their prompts, as in
rewriting, extraction and code.
"""

from __future__ import annotations

import numpy as np

from batchinfer.core.acceptance import Acceptance
from batchinfer.core.draft_length import DraftLength, StepLoad
from batchinfer.core.plan import Drafts, Plan
from batchinfer.core.sequences import SequenceTable

SHORTEST, LONGEST = 2, 5  # tokens that must have come before in the same order; the longer the match, the better the guess
NUM_KINDS = LONGEST - SHORTEST + 1


class NgramProposer:
    """Looks the end of each row up in its earlier tokens, and proposes what stood behind the longest match."""

    def __init__(self, table: SequenceTable, block_size: int, budget: int, length: DraftLength) -> None:
        self.acceptance = Acceptance(table.num_slots, NUM_KINDS)
        self._table = table
        self._block_size = block_size
        self._budget = budget
        self._length = length
        self._kinds = np.zeros(table.num_slots, np.int64)  # of the draft that each slot has in flight

    def propose(self, plan: Plan) -> Drafts:
        """Guesses for rows in the middle of their answers, where one may pay."""
        table, none = self._table, Drafts.none(len(plan.slots))
        load = StepLoad.of(plan, self._budget)
        least = self._length.least_chance(load)
        spans = np.flatnonzero(plan.samples)
        slots = plan.slots[spans]
        room = room_for_drafts(table, slots, self._block_size)
        worth = (self.acceptance.best_chances(slots) >= least) & (room > 0) & (table.num_tokens[slots] > table.num_prompt[slots])
        if not worth.all():
            self.acceptance.fade(slots[~worth])
            spans, slots, room = spans[worth], slots[worth], room[worth]
        guesses = [
            self._look_up(slot, most) for slot, most in zip(slots.tolist(), np.minimum(room, self._length.most).tolist(), strict=True)
        ]
        found = np.array([index for index, (_, guess) in enumerate(guesses) if len(guess)], np.int64)
        if not len(found):
            return none
        kinds = np.array([guesses[index][0] for index in found])
        lengths = np.array([len(guesses[index][1]) for index in found])
        chosen = self._length.choose(self.acceptance.chances(slots[found], kinds), lengths, load)
        if not chosen.any():
            return none
        self._kinds[slots[found]] = kinds
        counts = none.counts
        counts[spans[found]] = chosen
        tokens = [guesses[index][1][:count] for index, count in zip(found.tolist(), chosen.tolist(), strict=True)]
        return Drafts(counts, np.concatenate(tokens))

    def learn(self, plan: Plan, drafts: Drafts, accepted: np.ndarray) -> None:
        """Count how the guesses did."""
        drafted = drafts.counts > 0
        slots = plan.slots[drafted]
        self.acceptance.count(slots, self._kinds[slots], drafts.counts[drafted], accepted[drafted])

    def _look_up(self, slot: int, most: int) -> tuple[int, np.ndarray]:
        """(kind of the match, up to `most` tokens that followed it): the longest match, the latest among equals."""
        tokens = self._table.tokens[slot, : self._table.num_tokens[slot]]
        end = len(tokens)
        places = np.flatnonzero(tokens[: end - 1] == tokens[end - 1])  # positions of the match's last token
        places = places[places >= SHORTEST - 1]
        matched, length = places[:0], 0
        for n in range(1, LONGEST):
            if not len(places) or end <= n + 1:
                break
            places = places[places >= n]
            places = places[tokens[places - n] == tokens[end - 1 - n]]
            if len(places):
                matched, length = places, n + 1
        if not len(matched):
            return 0, tokens[:0]
        after = int(matched[-1]) + 1
        return length - SHORTEST, np.resize(tokens[after:], most)  # a match that touches the end: the text goes round in a circle


def room_for_drafts(table: SequenceTable, slots: np.ndarray, block_size: int) -> np.ndarray:
    """Tokens that may be guessed for each row: no more than its blocks hold, and one fewer than it may still get."""
    tokens = table.num_tokens[slots]
    room: np.ndarray = np.minimum(table.num_blocks[slots] * block_size - tokens, table.limit[slots] - tokens - 1)
    return room
