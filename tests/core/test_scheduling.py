"""Policies: order of admission, forecasts, shared prefixes, rows that can never run."""

from __future__ import annotations

import random

import numpy as np
import pytest

from batchinfer.core.block_pool import BlockPool
from batchinfer.core.forecast import OutputForecast, peak_tokens
from batchinfer.core.order import GroupedQueue, grouped
from batchinfer.core.request import Request, SamplingParams
from batchinfer.core.seeds import row_seed
from batchinfer.core.sequences import Sequence
from batchinfer.errors import InputError
from tests.fakes import Setup, make_engine, request, run_checked


def test_peak_equals_a_simulation() -> None:
    rng = random.Random(2)
    for _ in range(200):
        n = rng.randrange(1, 9)
        held = np.array([rng.randrange(1, 50) for _ in range(n)])
        rest = np.array([rng.randrange(0, 30) for _ in range(n)])
        simulated = max(sum(h + t for h, r in zip(held, rest, strict=True) if r >= t) for t in range(31))
        assert peak_tokens(held, rest) == simulated


def test_preemption_is_rare_because_admission_knows_the_ends() -> None:
    rows = [request(i, "abcdefgh"[: 1 + i % 8], max_tokens=40, ignore_eos=True) for i in range(60)]
    engine = make_engine(Setup(blocks=60, budget=200, max_num_seqs=32, prefix=False))
    run_checked(engine, rows)
    assert engine.stats.preemptions == 0
    assert engine.stats.peak_running > 4, "admission is too timid"
    assert engine.stats.peak_blocks_used > 45, "memory is left unused"


def test_a_shared_prefix_is_computed_once_even_by_rows_of_one_step() -> None:
    shared = "abcdefghijklmnopqrst"
    rows = [request(i, shared + "xy"[: 1 + i % 2] + "abc"[: i % 3], max_tokens=4, ignore_eos=True) for i in range(30)]
    engine = make_engine(Setup(budget=1000, max_num_seqs=30, blocks=400))
    run_checked(engine, rows)
    assert engine.stats.prompt_tokens - engine.stats.cached_prompt_tokens < len(shared) + 30 * 8
    assert engine.stats.cached_prompt_tokens >= 29 * len(shared)


def test_a_prefix_longer_than_the_budget_is_computed_once() -> None:
    shared = [i % 26 for i in range(150)]
    rows = [request(i, [*shared, i % 26, 3], max_tokens=3, ignore_eos=True) for i in range(20)]
    engine = make_engine(Setup(budget=40, max_num_seqs=20, blocks=400))
    run_checked(engine, rows)
    assert engine.stats.computed_tokens < 150 + 20 * (2 + 4 + 3) + 40


def test_duplicates_that_are_preempted_do_not_wait_for_each_others_answers() -> None:
    rows = [request(i, "abcdefghijkl", max_tokens=60, ignore_eos=True) for i in range(30)]
    steps = []
    for prefix in (True, False):
        engine = make_engine(Setup(blocks=60, budget=64, max_num_seqs=16, prefix=prefix, optimistic=True))
        run_checked(engine, rows)
        assert engine.stats.preemptions > 0
        steps.append(engine.stats.steps)
    assert steps[0] <= 1.2 * steps[1]


def test_shared_blocks_are_forecast_as_held() -> None:
    """Rows that share most of their blocks, in a pool that holds few of them: hardly a preemption."""
    shared = [i % 26 for i in range(96)]
    rows = [request(i, [*shared, i % 26], max_tokens=20 + i % 30, ignore_eos=True) for i in range(60)]
    engine = make_engine(Setup(blocks=60, budget=200, max_num_seqs=16))
    run_checked(engine, rows)
    assert engine.stats.preemptions <= 3
    assert engine.stats.peak_running >= 4


def test_groups_share_prefixes_and_long_outputs_start_first() -> None:
    rng = random.Random(0)
    system = [rng.randrange(26) for _ in range(80)]
    other = [rng.randrange(26) for _ in range(80)]
    rows = []
    for i in range(20):
        prompt = (system if i % 2 else other) + [i]
        rows.append(Sequence(i, request(i, prompt, max_tokens=10), limit=len(prompt) + (90 if i == 6 else 10), clipped=False))
    rows.append(Sequence(20, request(20, [1, 2, 3], max_tokens=400), limit=403, clipped=False))
    order = [seq.seq_id for seq in grouped(rows)]
    assert order[0] == 20
    assert order[1] == 6
    assert [i % 2 for i in order[1:11]] == [0] * 10


def test_returned_rows_go_first_and_none_is_lost() -> None:
    queue = GroupedQueue()
    seqs = [Sequence(i, request(i, "ab", max_tokens=5), 7, False) for i in range(10)]
    for seq in seqs:
        queue.push(seq)
    taken = []
    for seq in queue.take():
        taken.append(seq)
        if len(taken) == 4:
            break
    queue.push_front(taken[2:])
    rest = list(queue.take())
    assert rest[:2] == taken[2:]
    assert sorted(s.seq_id for s in taken[:2] + rest) == list(range(10))


def test_a_short_row_waits_for_one_generation_only() -> None:
    queue = GroupedQueue()
    queue.push(Sequence(0, request(0, "ab", max_tokens=1), 3, False))
    taken = []
    for i in range(1, 200):  # long rows keep coming, as from a long file
        queue.push(Sequence(i, request(i, "ab", max_tokens=90), 92, False))
        if i % 10 == 0:
            taken.append(next(queue.take()).seq_id)
    assert 0 in taken[:12]


def test_rows_that_can_never_run_are_refused_and_long_ones_clipped() -> None:
    engine = make_engine(Setup(blocks=9, block_size=4, max_model_len=64))  # a pool of 32 tokens
    with pytest.raises(InputError, match="pool holds 32"):
        engine.add(request(0, [1] * 33, max_tokens=1))
    with pytest.raises(InputError, match="64"):
        engine.add(request(0, [1] * 64, max_tokens=1))
    with pytest.raises(InputError, match="vocabulary"):
        engine.add(request(0, [1, 27], max_tokens=1))
    with pytest.raises(InputError, match="stop"):
        engine.add(Request(0, np.array([1], np.int32), SamplingParams(stop=("",))))
    with pytest.raises(InputError, match="max_tokens"):
        engine.add(Request(0, np.array([1], np.int32), SamplingParams(max_tokens=0)))
    got = run_checked(engine, [request(1, [1] * 28, max_tokens=400, ignore_eos=True)])[1]
    assert len(got.token_ids) == 5  # the last token needs no room
    assert got.finish_reason == "length"
    assert got.clipped
    narrow = make_engine(Setup(max_model_len=64, blocks=100))
    assert len(run_checked(narrow, [request(0, [1] * 63, max_tokens=9, ignore_eos=True)])[0].token_ids) == 1


@pytest.mark.parametrize("name", ["top_k", "min_tokens", "max_tokens", "temperature", "seed"])
@pytest.mark.parametrize("value", [2**31 - 1, 2**31, 2**62, 2**64, 10**300])
def test_numbers_at_the_edge_of_columns_are_refused_or_run(name: str, value: int) -> None:
    engine = make_engine(Setup())
    params = {"max_tokens": 2**62 if name == "min_tokens" else 5, name: value}
    try:
        checked = SamplingParams().updated(params)
    except InputError as err:
        assert name in str(err)  # noqa: PT017
        return
    results = run_checked(engine, [Request(0, np.array([1, 2], np.int32), checked), request(1, "ab", max_tokens=3, ignore_eos=True)])
    assert len(results[1].token_ids) == 3


def test_a_run_that_is_given_up_leaves_nothing_behind() -> None:
    engine = make_engine(Setup())
    for _ in engine.run([request(i, "abc", max_tokens=5 + i, ignore_eos=True) for i in range(20)]):
        break
    results = list(engine.run([request(0, "xyz", max_tokens=3, ignore_eos=True)]))
    assert [len(r.token_ids) for r in results] == [3]


def test_ids_of_another_width_share_prefixes_too() -> None:
    engine = make_engine(Setup())
    rows = [Request(i, np.arange(20, dtype=np.int64), SamplingParams(max_tokens=2, ignore_eos=True)) for i in range(3)]
    list(engine.run(rows))
    assert engine.stats.cached_prompt_tokens == 2 * 16


def test_run_reads_no_further_than_the_window() -> None:
    engine = make_engine(Setup())
    read = 0

    def rows() -> object:
        nonlocal read
        for i in range(5000):
            read += 1
            yield request(i, "ab", max_tokens=2, ignore_eos=True)

    results = engine.run(rows())  # type: ignore[arg-type]
    for _ in range(10):
        next(results)
    assert read <= 10 + 8 + max(2 * 8, 512)
    assert sum(1 for _ in results) == 4990


def test_a_block_held_by_two_rows_that_end_together_is_freed_once() -> None:
    pool = BlockPool(6)
    ids = pool.try_allocate(2)
    assert ids is not None
    pool.share(ids)
    pool.release(np.concatenate((ids[::-1], ids[::-1])))
    pool.check(np.empty(0, np.int32))
    assert pool.num_free == 5


def test_blocks_are_evicted_in_the_order_in_which_their_last_holder_left() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        pool = BlockPool(24)
        ids = pool.try_allocate(23)
        assert ids is not None
        pool.keyed[ids] = True
        rows = [rng.choice(ids, rng.integers(1, 12), replace=False) for _ in range(4)]
        for row in rows:
            pool.share(row)
        pool.release(ids)
        held = np.concatenate(rows).tolist()
        expected = [block for block in ids.tolist() if block not in held]
        expected += [block for place, block in enumerate(held) if block not in held[place + 1 :]]
        pool.release(np.array(held))
        evicted: list[int] = []
        pool.forget = evicted.extend
        assert pool.try_allocate(23) is not None
        assert evicted == expected


def test_the_forecast_of_one_row_is_that_of_many() -> None:
    forecast = OutputForecast(warmup=3)
    for ended in range(12):
        remaining, produced, exact = np.meshgrid([1, 5, 40, 4000], [0, 3, 11, 300], [False, True])
        columns = [column.ravel() for column in (remaining, produced, exact)]
        one_by_one = [forecast.expected_of_one(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        assert forecast.expected(*columns).tolist() == one_by_one
        forecast.finished(7 * ended)


def test_seeds_of_neighbours_differ_and_are_stable() -> None:
    assert len({row_seed(None, job, row) for job in range(30) for row in range(300)}) == 9000
    assert row_seed(7, 1, 2) == row_seed(7, 5, 9) == 7
    assert row_seed(-1, 0, 0) == 2**64 - 1
    assert row_seed(None, 0, 0) == 12035550249420947055  # fixed for ever: a resumed job must draw as it did
