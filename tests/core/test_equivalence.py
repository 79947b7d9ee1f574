"""The claim: no setting of the control plane changes a row's tokens."""

from __future__ import annotations

import random

from batchinfer.core.request import Request
from tests.fakes import LETTERS, Setup, make_engine, request, run_checked


def workload(seed: int) -> list[Request]:
    """Shared prefixes, lone prompts, and duplicates with another max_tokens (these find wrong publications)."""
    rng = random.Random(seed)
    shared = [rng.randrange(26) for _ in range(rng.randrange(0, 30))]
    rows: list[Request] = []
    for _ in range(rng.randrange(4, 14)):
        prompt = (shared if rng.random() < 0.7 else []) + [rng.randrange(26) for _ in range(rng.randrange(1, 20))]
        rows.append(request(len(rows), prompt, max_tokens=rng.randrange(1, 25), ignore_eos=rng.random() < 0.5))
    for row in list(rows):
        if rng.random() < 0.6:
            rows.append(request(len(rows), row.prompt_ids.tolist(), max_tokens=rng.randrange(1, 25), ignore_eos=row.params.ignore_eos))
    return rows


def outputs(setup: Setup, rows: list[Request]) -> tuple[dict[int, tuple], int]:
    engine = make_engine(setup)
    results = run_checked(engine, rows)
    return {row: (r.token_ids.tolist(), r.text, r.finish_reason) for row, r in results.items()}, engine.stats.preemptions


def settings(rng: random.Random, longest: int) -> Setup:
    size = rng.choice((2, 4, 8))
    return Setup(
        max_model_len=longest,
        blocks=rng.choice((400, 3 * (-(-longest // size)) + 2, -(-longest // size) + 2)),
        block_size=size,
        budget=rng.choice((1, 5, 16, 64)),
        max_num_seqs=rng.choice((1, 3, 8)),
        kv_cache=rng.random() < 0.7,
        paged=rng.random() < 0.7,
        prefix=rng.random() < 0.7,
        continuous=rng.random() < 0.7,
        chunked=rng.random() < 0.7,
        grouped=rng.random() < 0.5,
        optimistic=rng.random() < 0.7,
        num_tokens=27,
    )


def test_every_setting_gives_the_same_tokens() -> None:
    rng = random.Random(0)
    preemptions = 0
    for seed in range(40):
        rows = workload(seed)
        expected, _ = outputs(Setup(num_tokens=27), rows)
        assert sorted(expected) == list(range(len(rows)))
        longest = max(len(r.prompt_ids) + r.params.max_tokens for r in rows)
        for _ in range(6):
            setup = settings(rng, longest)
            got, preempted = outputs(setup, rows)
            assert got == expected, setup
            preemptions += preempted
    assert preemptions > 100, "the small pools hardly forced preemption: the test proves too little"


def test_a_long_random_walk_keeps_every_invariant() -> None:
    rng = random.Random(5)
    engine = make_engine(Setup(blocks=60, budget=24, max_num_seqs=6, num_tokens=27))
    finished = 0
    for row in range(400):
        engine.add(request(row, [rng.randrange(3) for _ in range(rng.randrange(1, 60))], max_tokens=rng.randrange(1, 40)))
        for _ in range(rng.randrange(0, 6)):
            finished += len(engine.step())
            engine.memory.check()
    while engine.num_unfinished:
        finished += len(engine.step())
        engine.memory.check()
    assert finished == 400
    assert engine.stats.cached_prompt_tokens > 0
    assert engine.memory.pool.num_used == 0


def test_abort_gives_everything_back() -> None:
    engine = make_engine(Setup())
    for row in range(20):
        engine.add(request(row, "abcabcabc", max_tokens=30, stop=("q",)))
    engine.step()
    engine.abort()
    engine.memory.check()
    assert engine.num_unfinished == 0
    assert engine.memory.pool.num_used == 0
    again = run_checked(engine, [request(99, "abcabcabc", max_tokens=5, ignore_eos=True)])
    assert len(again[99].token_ids) == 5


def test_vocabulary_of_the_fakes() -> None:
    assert LETTERS.decode([0, 26, 1]) == "ab"
    assert LETTERS.decode([0, 26, 1], skip_special_tokens=False) == "a<eos>b"
