"""Penalties, biases and bad words: as transformers' processors change fixed logits, at every place of a draft, and as distributions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from batchinfer.core.request import Request, SamplingParams
from batchinfer.core.sequences import Sequence, SequenceTable
from batchinfer.runtime.bias import BadWords, LogitBias, spellings
from batchinfer.runtime.logits import Editor, MinTokens, apply_edits
from batchinfer.runtime.penalties import Penalties
from tests.engine.draws import KINDS, columns, put, sampler

VOCAB, WIDTH = 400, 150  # slices as a head gives them


def encode(text: str) -> list[int]:
    """A word is a token of its letters' sum, another one behind a space; a longer one takes two."""
    spaced, word = text.startswith(" "), text.strip()
    first = sum(map(ord, word[:3])) % 150 + (150 if spaced else 0)
    return [first] if len(word) <= 3 else [first, 300 + sum(map(ord, word[3:])) % 90]


class World:
    """Running rows with all editors, over random prompts and answers."""

    def __init__(self, params: list[SamplingParams], prompt: int = 30, answer: int = 12) -> None:
        rng = np.random.default_rng(4)
        self.table = SequenceTable(len(params) + 2, 80, 4)
        self.editors: tuple[Editor, ...] = (
            BadWords(self.table, encode, VOCAB),
            MinTokens(self.table, [9], lambda p: p.stop_token_ids),
            LogitBias(self.table),
            Penalties(self.table),
        )
        slots = []
        for i, asked in enumerate(params):
            seq = Sequence(i, Request(i, rng.integers(0, 50, prompt).astype(np.int32), asked.check()), limit=70, clipped=False)
            seq.output_ids = rng.integers(30, 80, answer).astype(np.int32)
            slots.append(self.table.admit(seq, seed=i))
            for editor in self.editors:
                editor.admit(seq)
        self.slots = np.array(slots, np.int32)

    def edited(self, logits: Tensor, slots: np.ndarray | None = None, places: np.ndarray | None = None) -> Tensor:
        slots = self.slots if slots is None else slots
        places = self.table.num_tokens[slots] if places is None else places
        edits = [edit for editor in self.editors for edit in editor.edits(slots, places)]
        parts = [apply_edits(edits, first, logits[:, first : first + WIDTH]) for first in range(0, VOCAB, WIDTH)]
        assert all(isinstance(part, Tensor) for part in parts)
        return torch.cat([part for part in parts if isinstance(part, Tensor)], 1)

    def text(self, row: int) -> Tensor:
        return torch.from_numpy(self.table.tokens[self.slots[row], : self.table.num_tokens[self.slots[row]]])[None].long()


def logits(rows: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def test_penalties_and_biases_are_those_of_transformers() -> None:
    bias = ((3, 2.5), (40, -7.0), (399, 100.0))
    asked: list[dict[str, Any]] = [{"repetition_penalty": 1.3}, {"repetition_penalty": 0.7}, {"logit_bias": bias}, {}]
    world = World([SamplingParams(**options) for options in asked])
    x = logits(4)
    found = world.edited(x)
    for row, penalty in enumerate((1.3, 0.7)):
        assert torch.equal(found[row], RepetitionPenaltyLogitsProcessor(penalty)(world.text(row), x[row : row + 1])[0])
    biased = SequenceBiasLogitsProcessor({(i,): amount for i, amount in bias})(world.text(2), x[2:3].clone())
    assert torch.equal(found[2], biased[0])
    assert torch.equal(found[3], x[3])


def test_bad_words_are_those_of_transformers_where_the_prompt_does_not_count() -> None:
    words = ("ab", "flower", "garden")
    world = World([SamplingParams(bad_words=words)] * 3, prompt=1, answer=12)
    table = world.table
    table.tokens[world.slots[0], 12] = encode("flower")[0]
    table.tokens[world.slots[1], 12] = encode(" garden")[0]
    x = logits(3)
    found = world.edited(x)
    for row in range(3):
        expected = NoBadWordsLogitsProcessor([list(ids) for ids in spellings(words, encode)])(world.text(row), x[row : row + 1].clone())
        assert torch.equal(found[row], expected[0]), row
    assert [int((found[row] == -torch.inf).sum()) for row in range(3)] == [3, 3, 2]


def test_a_word_begun_by_the_prompt_is_not_banned() -> None:
    world = World([SamplingParams(bad_words=("flower",))], prompt=5, answer=0)
    world.table.tokens[world.slots[0], 4] = encode("flower")[0]
    x = logits(1)
    assert torch.equal(world.edited(x), x)


def test_presence_and_frequency_look_at_the_answer_alone() -> None:
    world = World([SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25, repetition_penalty=1.5)])
    x = logits(1)
    found = world.edited(x)
    answer = world.table.output_of(int(world.slots[0]))
    counts = torch.from_numpy(np.bincount(answer, minlength=VOCAB)).float()
    expected = RepetitionPenaltyLogitsProcessor(1.5)(world.text(0), x.clone())[0] + 0.25 * counts - 0.5 * (counts > 0)
    assert torch.equal(found[0], expected)
    assert len(np.unique(answer)) < len(answer), "no token comes twice"


def test_every_logit_row_of_a_draft_sees_the_drafts_before_it() -> None:
    """As if they had been said: a second world says them for real, one after another."""
    asked = [
        SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={7: 1.0}, bad_words=["flower", "ab"]),
        SamplingParams(presence_penalty=1.0, min_tokens=14),
        SamplingParams(),
    ]
    world, other = World(asked), World(asked)
    drafts = np.array([[*encode("flower")[:1], 33, 34, 33], [60, 61, 60, 9], [1, 2, 3, 4]], np.int32)
    x = logits(15)
    for row, slot in enumerate(world.slots.tolist()):
        end = int(world.table.num_tokens[slot])
        world.table.tokens[slot, end : end + 4] = drafts[row]
    slots = np.repeat(world.slots, 5)
    places = np.repeat(world.table.num_tokens[world.slots], 5) + np.tile(np.arange(5), 3)
    together = world.edited(x, slots, places)
    for offset in range(5):
        assert torch.equal(other.edited(x[offset::5]), together[offset::5]), offset
        if offset < 4:
            other.table.append(other.slots, drafts[:, offset])
    assert torch.equal(world.edited(x, slots, places), together), "looking at drafts changed what is remembered"


def test_rows_come_and_go_and_long_texts_are_counted() -> None:
    world = World([SamplingParams(repetition_penalty=1.0 + 0.1 * i, presence_penalty=0.1) for i in range(9)])
    gone = world.slots[[1, 4, 5]]
    for editor in world.editors:
        editor.forget(gone)
    world.table.remove(gone)
    fresh = World([SamplingParams()])
    seq = Sequence(50, Request(50, np.arange(60, dtype=np.int32), SamplingParams(repetition_penalty=2.0)), limit=70, clipped=False)
    world.table.admit(seq, 1)
    for editor in world.editors:
        editor.admit(seq)
    for _ in range(6):
        world.table.append(np.array([seq.slot], np.int32), np.array([200], np.int32))
    x = logits(1)
    found = world.edited(x, np.array([seq.slot], np.int32))
    ids = torch.from_numpy(world.table.tokens[seq.slot, : world.table.num_tokens[seq.slot]])[None].long()
    assert torch.equal(found, RepetitionPenaltyLogitsProcessor(2.0)(ids, x.clone()))
    assert not any(editor.edits(fresh.slots, fresh.table.num_tokens[fresh.slots]) for editor in fresh.editors)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.02}], ids=str)
def test_draws_follow_the_penalised_distribution(kind: str, filters: dict[str, Any]) -> None:
    """Pearson's chi-square of 20,000 draws against the softmax of the edited logits, cut by transformers' filters."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    draws = 20_000
    params = SamplingParams(repetition_penalty=1.4, presence_penalty=0.7, logit_bias={5: 3.0, 390: 4.0}, bad_words=["ab"])
    world = World([params])
    edited = world.edited(logits(1, seed=3) * 0.6)
    asked = columns(draws, vocab=VOCAB, temperature=0.8, **filters)
    counts = np.bincount(put(sampler(kind, VOCAB), edited.expand(draws, -1), asked, (WIDTH, WIDTH)).token_ids, minlength=VOCAB)
    scores = TemperatureLogitsWarper(0.8)(world.text(0), edited)
    for name, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        if name in filters:
            scores = warper(filters[name])(world.text(0), scores)
    chances = scores.double().softmax(-1)[0].numpy()
    assert not counts[chances == 0].any()
    expected = chances * draws
    often = expected >= 5
    observed, wanted = np.append(counts[often], counts[~often].sum()), np.append(expected[often], expected[~often].sum())
    statistic = float((((observed - wanted) ** 2)[wanted > 0] / wanted[wanted > 0]).sum())
    freedom = int((wanted > 0).sum()) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5, (statistic, freedom)
