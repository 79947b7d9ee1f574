"""The claims of speculation: no draft changes a token, guesses are found where they are, and only paying ones are verified."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from batchinfer.core.acceptance import Acceptance
from batchinfer.core.draft_length import AdaptiveDepth, AdaptiveLength, FixedLength, StepLoad
from batchinfer.core.ngram import LONGEST, SHORTEST, NgramProposer
from batchinfer.core.plan import Drafts, StepResult
from batchinfer.core.sequences import Sequence, SequenceTable
from tests.core.test_equivalence import outputs, settings, workload
from tests.fakes import Guesser, Setup, make_engine, request, run_checked


class StraightCost:
    """A step costs so much, and each token and logit row so much more."""

    def __init__(self, step: float, token: float, logit: float = 0.0) -> None:
        self._step, self._token, self._logit = step, token, logit

    def seconds(
        self, num_tokens: np.ndarray, num_logits: np.ndarray, decode_context: float = 0, prefill_attention: float = 0.0
    ) -> np.ndarray:
        return self._step + self._token * np.asarray(num_tokens) + self._logit * np.asarray(num_logits)


def with_guesser(setup: Setup, rows: list, answers: dict[int, list[int]]) -> tuple[dict[int, tuple], Guesser, int]:
    engine = make_engine(setup)
    guesser = Guesser(engine.memory.table, setup.block_size, setup.budget, answers)
    engine.drafter = guesser
    results = run_checked(engine, rows)
    assert engine.stats.output_tokens == sum(len(r.token_ids) for r in results.values())
    return {row: (r.token_ids.tolist(), r.text, r.finish_reason) for row, r in results.items()}, guesser, engine.stats.preemptions


def test_drafts_change_no_token_whatever_the_settings() -> None:
    rng = random.Random(1)
    accepted = proposed = preemptions = 0
    for seed in range(30):
        rows = workload(seed)
        expected, _ = outputs(Setup(num_tokens=27), rows)
        answers = {row: answer[0] for row, answer in expected.items()}
        longest = max(len(r.prompt_ids) + r.params.max_tokens for r in rows)
        for _ in range(8):
            setup = settings(rng, longest)
            setup = Setup(**{**setup.__dict__, "lookahead": rng.choice((0, 3, 6))})
            got, guesser, preempted = with_guesser(setup, rows, answers)
            assert got == expected, setup
            accepted, proposed, preemptions = accepted + guesser.accepted, proposed + guesser.proposed, preemptions + preempted
    assert preemptions > 50
    assert accepted > 1000
    assert proposed > 1.3 * accepted, "too few wrong guesses: the test proves too little"


def test_right_guesses_save_steps() -> None:
    rows = [request(i, "abcdefg", max_tokens=61, ignore_eos=True) for i in range(4)]
    plain, _ = outputs(Setup(), rows)
    engine = make_engine(Setup(lookahead=6))
    guesser = Guesser(engine.memory.table, 4, 64, {row: answer[0] for row, answer in plain.items()})
    guesser._rng = random.Random(3)
    engine.drafter = guesser
    run_checked(engine, rows)
    assert engine.stats.steps < 45
    assert engine.stats.accepted_tokens == guesser.accepted
    assert engine.stats.proposed_tokens == guesser.proposed


@pytest.mark.parametrize("stop", ["q", "ab", "xyz"])
def test_a_stop_inside_accepted_drafts_ends_the_row_there(stop: str) -> None:
    rows = [request(i, [i, 3, 5], max_tokens=60, stop=(stop,), min_tokens=i % 7) for i in range(20)]
    expected, _ = outputs(Setup(), rows)
    longer = [request(i, [i, 3, 5], max_tokens=60, ignore_eos=True) for i in range(20)]
    answers = {row: answer[0] for row, answer in outputs(Setup(), longer)[0].items()}
    got, guesser, _ = with_guesser(Setup(lookahead=6), rows, answers)
    assert got == expected
    assert guesser.accepted > 20


def table_with(tokens: list[int], prompt: int = 1) -> SequenceTable:
    table = SequenceTable(2, 64, 16)
    table.admit(Sequence(0, request(0, tokens, max_tokens=64), limit=64, clipped=False), 0)
    slot = int(table.running()[0])
    table.num_prompt[slot], table.num_blocks[slot] = prompt, 16
    return table


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 9, 1, 2], [3, 9, 1]),
        ([1, 2, 3, 7, 1, 2, 4, 7, 1, 2], [4, 7, 1]),  # the latest of equal matches
        ([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2], [3, 6, 1]),  # a longer match before a later one
        ([4, 4, 4], [4, 4, 4]),  # goes round
        ([8, 1, 2, 1, 2], [1, 2, 1]),
        ([1, 2, 3, 4, 5, 6], []),
        ([2, 3, 4, 2], []),  # one token alone is no match
        ([3], []),
        ([3, 3], []),
    ],
)
def test_ngrams_are_looked_up(tokens: list[int], expected: list[int]) -> None:
    proposer = NgramProposer(table_with(tokens), 4, 1000, FixedLength(3))
    kind, guess = proposer._look_up(int(proposer._table.running()[0]), 3)
    assert guess.tolist() == expected
    assert 0 <= kind <= LONGEST - SHORTEST


def test_ngram_drafts_change_no_token_and_some_are_right() -> None:
    rows = [request(i, [i % 2, 1, 0, 1], max_tokens=50, ignore_eos=True) for i in range(12)]
    expected, _ = outputs(Setup(num_tokens=2), rows)
    for length in (FixedLength(4), AdaptiveLength(StraightCost(1.0, 0.01), 4), AdaptiveLength(StraightCost(1.0, 0.08, 0.02), 4)):
        setup = Setup(num_tokens=2, lookahead=4)
        engine = make_engine(setup)
        engine.drafter = NgramProposer(engine.memory.table, setup.block_size, setup.budget, length)
        results = run_checked(engine, rows)
        assert {row: r.token_ids.tolist() for row, r in results.items()} == {row: answer[0] for row, answer in expected.items()}
        assert 0 < engine.stats.accepted_tokens < engine.stats.proposed_tokens


def best_by_trying(chances: np.ndarray, lengths: np.ndarray, cost: StraightCost, load: StepLoad, most: int) -> float:
    """The highest rate of any choice: tokens per second of the step."""
    best = 0.0
    for chosen in itertools.product(*(range(min(most, n) + 1) for n in lengths)):
        extra = sum(chosen)
        if extra > load.room:
            continue
        saved = sum(sum(p**j for j in range(1, k + 1)) for p, k in zip(chances, chosen, strict=True))
        seconds = float(cost.seconds(np.array(load.num_tokens + extra), np.array(load.num_logits + extra)))
        best = max(best, (load.num_logits + saved) / seconds)
    return best


def test_adaptive_length_is_as_good_as_the_best_choice() -> None:
    rng = np.random.default_rng(4)
    took = 0
    for _ in range(60):
        count = int(rng.integers(1, 4))
        chances, lengths = rng.uniform(0.02, 0.98, count), rng.integers(1, 4, count)
        cost = StraightCost(1.0, float(rng.uniform(0.0, 0.6)), float(rng.uniform(0.0, 0.3)))
        load = StepLoad(count, count, 100, int(rng.integers(0, 9)))
        length = AdaptiveLength(cost, 3)
        chosen = length.choose(chances, lengths, load)
        assert (chosen <= np.minimum(lengths, 3)).all()
        assert chosen.sum() <= load.room
        saved = sum(sum(p**j for j in range(1, k + 1)) for p, k in zip(chances, chosen, strict=True))
        seconds = float(cost.seconds(np.array(load.num_tokens + chosen.sum()), np.array(load.num_logits + chosen.sum())))
        plain = load.num_logits / float(cost.seconds(np.array(load.num_tokens), np.array(load.num_logits)))
        rate = (load.num_logits + saved) / seconds
        assert rate >= 0.97 * best_by_trying(chances, lengths, cost, load, 3)
        assert rate >= plain * (1 - 1e-9)
        if (chances < length.least_chance(load)).all():
            assert not chosen.any()
        took += bool(chosen.any())
    assert 10 < took < 55, "the costs are all alike: the test proves too little"


def test_where_every_token_costs_alike_no_draft_is_worth_it() -> None:
    length = AdaptiveLength(StraightCost(0.0, 1.0), 4)
    load = StepLoad(64, 64, 64 * 300, 1000)
    assert length.least_chance(load) >= 1.0
    assert not length.choose(np.full(64, 0.95), np.full(64, 4), load).any()
    assert AdaptiveDepth(StraightCost(0.0, 1.0), StraightCost(0.0, 0.1), 4).choose(0.95, load, 64, 64) == 0


def test_a_draft_model_guesses_further_where_steps_are_dear_and_guesses_good() -> None:
    load = StepLoad(4, 4, 400, 1000)
    depth = AdaptiveDepth(StraightCost(1.0, 0.01), StraightCost(0.05, 0.001), 8)
    found = [depth.choose(chance, load, 4, 4) for chance in (0.0, 0.3, 0.7, 0.95)]
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] >= 5
    assert depth.choose(0.95, StepLoad(4, 4, 400, 7), 4, 4) == 1, "the budget has room for one token a row"


def test_acceptance_is_learned_per_row_and_fades() -> None:
    table = SequenceTable(4, 16, 4)
    known = Acceptance(4, 2)
    for i in range(2):
        seq = Sequence(i, request(i, [1], max_tokens=3), 4, False)
        table.admit(seq, 0)
        known.admit(seq)
    slots, kinds = table.running().astype(np.int64).copy(), np.array([0, 1])
    for _ in range(40):
        known.count(slots, kinds, np.array([3, 3]), np.array([3, 0]))
    good, bad = known.chances(slots, kinds)
    assert good > 0.9
    assert bad < 0.1
    assert (known.best_chances(slots) >= known.chances(slots, kinds)).all()
    for _ in range(5000):
        known.fade(slots)
    assert known.chances(slots, kinds) == pytest.approx([0.5, 0.5], abs=0.1)
    estimate = Acceptance(4, 1)
    rng = random.Random(0)
    for _ in range(4000):  # a chance of 0.7 for each token in turn
        accepted = next((i for i in range(4) if rng.random() > 0.7), 4)
        estimate.count(slots[:1], np.zeros(1, int), np.array([4]), np.array([accepted]))
    assert float(estimate.common()[0]) == pytest.approx(0.7, abs=0.06)


def test_waves_of_a_result() -> None:
    result = StepResult(np.array([1, 2, 3, 4, 5, 6], np.int32), np.array([1, 3, 2], np.int32))
    assert [(i.tolist(), t.tolist()) for i, t in result.waves()] == [([0, 1, 2], [1, 2, 5]), ([1, 2], [3, 6]), ([1], [4])]
    assert result.part(np.array([True, False, True])).token_ids.tolist() == [1, 5, 6]
    assert not len(Drafts.none(3).token_ids)
