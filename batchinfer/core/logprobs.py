"""Log-probabilities of a row's tokens, kept by the place that a token fills.

A place that is computed again (a guess that was wrong, a preemption, a retried step) is simply written again, so that
what is told of a row is always about the tokens that it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from batchinfer.core.plan import Plan
from batchinfer.core.sequences import Sequence, SequenceTable
from batchinfer.core.token_logprobs import TokenLogprobs

_NOBODY = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class ScoredPlaces:
    """Prompt tokens whose log-probability a step computes: token `places[i]` of `slots[i]`, by its own span's logits."""

    rows: np.ndarray  # int64 [P], of the plan's tokens: the one before the token that is scored
    slots: np.ndarray  # int64 [P]
    places: np.ndarray  # int64 [P]


NO_PLACES = ScoredPlaces(_NOBODY, _NOBODY, _NOBODY)


class Scores(Protocol):
    """Whose log-probabilities a head computes, and where they go."""

    def among(self, slots: np.ndarray) -> np.ndarray:
        """Indices int64 of the slots whose rows ask for their answers' log-probabilities."""

    def alternatives(self, slots: np.ndarray, prompt: bool) -> np.ndarray:
        """How many alternatives each of the (asking) slots wants, int64 [N]."""

    def prompt_places(self, plan: Plan, starts: np.ndarray) -> ScoredPlaces:
        """The prompt tokens to score in a step whose span i begins at row `starts[i]`."""

    def put(self, slot: int, place: int, logprob: float, top_ids: np.ndarray, top_logprobs: np.ndarray) -> None:
        """Write what is known of the token at a place."""


class NoScores:
    """Nobody asks: for a draft model's guesses, and for measuring."""

    def among(self, slots: np.ndarray) -> np.ndarray:
        """None of them."""
        return _NOBODY

    def alternatives(self, slots: np.ndarray, prompt: bool) -> np.ndarray:
        """None of them asks."""
        return np.zeros(len(slots), np.int64)

    def prompt_places(self, plan: Plan, starts: np.ndarray) -> ScoredPlaces:
        """No places."""
        return NO_PLACES

    def put(self, slot: int, place: int, logprob: float, top_ids: np.ndarray, top_logprobs: np.ndarray) -> None:
        """Keep nothing."""


@dataclass(slots=True, eq=False)
class _Row:
    """What is known of one unfinished row."""

    num_prompt: int
    answer: TokenLogprobs | None
    prompt: TokenLogprobs | None


class RowScores:
    """The log-probabilities of unfinished rows. A memory listener; what a preempted row had is kept."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._rows: dict[int, _Row] = {}  # seq_id -> numbers
        self._at: dict[int, _Row] = {}  # slot -> the same
        self._answers = np.zeros(table.num_slots, bool)
        self._prompts = np.zeros(table.num_slots, bool)

    def admit(self, seq: Sequence) -> None:
        """Follow the row if it asks."""
        params = seq.request.params
        of_prompt = None if seq.choice else params.prompt_logprobs  # the same for every answer
        if params.logprobs is None and of_prompt is None:
            return
        if seq.seq_id not in self._rows:
            num_prompt = len(seq.request.prompt_ids)
            answer = None if params.logprobs is None else TokenLogprobs.unknown(seq.limit - num_prompt, params.logprobs)
            prompt = None if of_prompt is None else TokenLogprobs.unknown(num_prompt, of_prompt)
            if prompt is not None:
                prompt.logprobs[0] = np.nan  # nothing stands before the first token
            self._rows[seq.seq_id] = _Row(num_prompt, answer, prompt)
        self._at[seq.slot] = self._rows[seq.seq_id]
        self._answers[seq.slot] = params.logprobs is not None
        self._prompts[seq.slot] = of_prompt is not None

    def forget(self, slots: np.ndarray) -> None:
        """These rows leave their slots, perhaps to come back."""
        if self._at:
            for slot in slots.tolist():
                self._at.pop(slot, None)
            self._answers[slots] = self._prompts[slots] = False

    def among(self, slots: np.ndarray) -> np.ndarray:
        """Indices int64 of the slots whose rows ask for their answers' log-probabilities."""
        return np.flatnonzero(self._answers[slots]) if self._at else _NOBODY

    def alternatives(self, slots: np.ndarray, prompt: bool) -> np.ndarray:
        """How many alternatives each of the (asking) slots wants, int64 [N]."""
        found = [self._at[slot].prompt if prompt else self._at[slot].answer for slot in slots.tolist()]
        return np.array([0 if part is None else part.top_ids.shape[1] for part in found], np.int64)

    def prompt_places(self, plan: Plan, starts: np.ndarray) -> ScoredPlaces:
        """The prompt tokens to score in a step whose span i begins at row `starts[i]`."""
        spans = np.flatnonzero(self._prompts[plan.slots]) if self._at else _NOBODY
        counts = np.clip(self._table.num_prompt[plan.slots[spans]] - 1 - plan.start[spans], 0, plan.num_tokens[spans])
        if not counts.any():
            return NO_PLACES
        offset = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        first = np.repeat(starts[spans], counts), np.repeat(plan.start[spans], counts)
        return ScoredPlaces(first[0] + offset, np.repeat(plan.slots[spans], counts), first[1] + offset + 1)

    def put(self, slot: int, place: int, logprob: float, top_ids: np.ndarray, top_logprobs: np.ndarray) -> None:
        """Write what is known of the token at a place."""
        row = self._at[slot]
        part, index = (row.prompt, place) if place < row.num_prompt else (row.answer, place - row.num_prompt)
        if part is None or index >= len(part.logprobs):  # a guess beyond the row's limit
            return
        part.logprobs[index], part.top_ids[index], part.top_logprobs[index] = logprob, top_ids, top_logprobs

    def finish(self, seq: Sequence, num_output: int) -> tuple[TokenLogprobs | None, TokenLogprobs | None]:
        """The numbers of the answer and of the prompt of a row that ends, each where it was asked for."""
        row = self._rows.pop(seq.seq_id, None)
        if row is None:
            return None, None
        return None if row.answer is None else row.answer.part(0, num_output), row.prompt

    def clear(self) -> None:
        """Forget rows that will never come back."""
        self._rows.clear()
