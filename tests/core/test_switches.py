"""Features that are switched off are really absent: no KV is kept, memory is one piece per row, batches are static."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from batchinfer.build_control import whole_slabs
from batchinfer.core.contiguous import ContiguousPool
from batchinfer.core.plan import Plan
from batchinfer.engine import Engine
from batchinfer.errors import CapacityError
from tests.fakes import HistoryModel, Setup, Span, make_engine, request, run_checked

NO_CACHE = Setup(kv_cache=False)
SLABS = Setup(paged=False, blocks=151, max_model_len=40)  # 15 slabs of 10 blocks
STATIC = Setup(continuous=False, max_num_seqs=4, grouped=False, prefix=False)


def steps_of(engine: Engine, rows: list[Any]) -> list[Plan]:
    """Run to the end; the plan of every step."""
    plans: list[Plan] = []
    settle = engine.scheduler.settle

    def noted(plan: Plan) -> None:
        plans.append(plan)
        settle(plan)

    engine.scheduler.settle = noted  # type: ignore[method-assign]
    run_checked(engine, rows)
    return plans


def test_without_kv_cache_every_step_computes_whole_sequences_and_holds_nothing_after() -> None:
    engine = make_engine(NO_CACHE)
    rows = [request(i, "abcdef"[: 1 + i % 6], max_tokens=8, ignore_eos=True) for i in range(12)]
    for row in rows:
        engine.add(row)
    while engine.num_unfinished:
        engine.step()
        engine.memory.check()
        assert engine.memory.pool.num_used == 0
        assert not engine.memory.table.num_computed[engine.memory.table.running()].any()
    assert engine.stats.computed_tokens == sum(len(row.prompt_ids) + said for row in rows for said in range(8))
    assert engine.stats.cached_prompt_tokens == engine.stats.preemptions == 0
    assert 0 < engine.stats.peak_blocks_used * 4 <= NO_CACHE.budget + 8 * 4


@pytest.mark.parametrize("budget", [1, 7, 20, 60])
def test_whole_sequences_take_turns(budget: int) -> None:
    """Whoever ran is behind all that were there: nobody waits for more steps than there are rows running beside it."""
    rng = random.Random(budget)
    engine = make_engine(Setup(kv_cache=False, budget=budget, max_num_seqs=6, blocks=14))
    table, ran = engine.memory.table, {}
    rows = [request(i, [i % 26] * rng.randrange(1, 30), max_tokens=rng.randrange(1, 15), ignore_eos=True) for i in range(40)]
    for row in rows:
        engine.add(row)
    for step in itertools.count():
        before = {table.sequences[slot].request.row: table.num_tokens[slot] for slot in table.running().tolist()}  # type: ignore[union-attr]
        finished = {result.row for result in engine.step()}
        after = {table.sequences[slot].request.row: table.num_tokens[slot] for slot in table.running().tolist()}  # type: ignore[union-attr]
        ran.update(dict.fromkeys(finished | {row for row in after if after[row] != before.get(row)}, step))
        assert all(step - ran[row] <= 6 for row in after)
        if not engine.num_unfinished:
            break
    assert len(ran) == 40
    assert engine.stats.preemptions == 0


def test_a_step_is_never_empty_when_memory_for_rows_ran_out() -> None:
    engine = make_engine(Setup(kv_cache=False, budget=12))
    for i in range(8):
        engine.add(request(i, "abcdefghij"[: 4 + i % 3], max_tokens=20, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.scheduler.shrink(2, 8)
    tokens = engine.stats.output_tokens
    while engine.num_unfinished:
        engine.step()
        assert engine.stats.output_tokens > tokens
        tokens = engine.stats.output_tokens


def test_a_row_has_one_piece_of_memory_from_start_to_end() -> None:
    engine = make_engine(SLABS)
    table, first = engine.memory.table, {}
    for i in range(60):
        engine.add(request(i, [i % 26] * (1 + i % 30), max_tokens=40, ignore_eos=i % 2 == 0))
    while engine.num_unfinished:
        engine.step()
        engine.memory.check()
        for slot in table.running().tolist():
            seq = table.sequences[slot]
            assert seq is not None
            blocks = table.block_table[slot, : table.num_blocks[slot]]
            assert len(blocks) == 10
            assert first.setdefault(seq.seq_id, blocks[0]) == blocks[0]
    assert engine.memory.pool.num_used == 0
    assert engine.stats.preemptions == engine.stats.cached_prompt_tokens == 0
    assert engine.stats.peak_running == 8
    assert engine.stats.peak_blocks_used == 80, "a slab counts as used, whatever is in it"


def test_as_many_rows_run_as_there_are_slabs() -> None:
    engine = make_engine(Setup(paged=False, blocks=38, max_model_len=40))  # three slabs of ten, and seven blocks left over
    run_checked(engine, [request(i, "ab", max_tokens=3, ignore_eos=True) for i in range(30)])
    assert engine.stats.peak_running == 3
    assert engine.limits.num_blocks == 31


def test_a_pool_that_holds_no_slab_is_refused_with_the_way_out() -> None:
    with pytest.raises(CapacityError, match=r"--max-model-len 2,048 .* holds 1,984: .* --num-kv-blocks or --kv-cache-memory"):
        whole_slabs(63, 8, 2048, 32)
    assert whole_slabs(200, 8, 100, 32) == 1 + 8 * 4
    assert whole_slabs(20, 8, 100, 32) == 1 + 4 * 4


def test_slabs_come_and_go_at_random() -> None:
    rng, pool, held = random.Random(3), ContiguousPool(7, 5), []
    for _ in range(500):
        if rng.random() < 0.5:
            ids = pool.try_allocate(5)
            assert (ids is None) == (len(held) == 7)
            held += [] if ids is None else [ids]
        elif held:
            several = [held.pop(rng.randrange(len(held))) for _ in range(rng.randrange(1, len(held) + 1))]
            pool.release(np.concatenate([ids[::-1] for ids in several]))
            assert len(pool.discard(several[0])) == 5
        pool.check(np.concatenate(held) if held else np.empty(0, np.int32))
        assert pool.num_used == 5 * len(held)


def batches_of(plans: list[Plan]) -> list[int]:
    """Rows in each static batch: a batch ends where none of a step's slots computed before."""
    sizes: list[int] = []
    for plan in plans:
        joined = int(np.count_nonzero(plan.start == 0))
        if joined == len(plan.slots):
            sizes.append(0)
        sizes[-1] += joined
    return sizes


def test_a_static_batch_ends_whole_before_the_next_begins() -> None:
    rows = [request(i, [i % 26], max_tokens=2 + 5 * (i % 4), ignore_eos=True) for i in range(18)]
    plans = steps_of(make_engine(STATIC), rows)
    assert batches_of(plans) == [4, 4, 4, 4, 2]
    ends = [len(plan.slots) for plan in plans]
    assert sum(now > before for before, now in itertools.pairwise(ends)) == 4, "a row joined while others ran"


def test_rows_that_end_while_a_batch_forms_are_not_replaced() -> None:
    """Four places, prompts that fill the step's budget: the first row has ended before the last one joins."""
    rows = [request(i, [i % 26] * 30, max_tokens=1 if i % 4 == 0 else 12, ignore_eos=True) for i in range(12)]
    engine = make_engine(replace(STATIC, budget=32))
    assert batches_of(steps_of(engine, rows)) == [4, 4, 4]
    assert engine.stats.peak_running < 4


def test_a_static_batch_is_full_when_memory_is() -> None:
    rows = [request(i, [i % 26] * 20, max_tokens=20, ignore_eos=True) for i in range(8)]
    sizes = batches_of(steps_of(make_engine(replace(STATIC, max_num_seqs=8, blocks=36, budget=500)), rows))
    assert sizes == [3, 3, 2]


def test_preempted_rows_wait_for_the_next_batch() -> None:
    rows = [request(i, "abc", max_tokens=40, ignore_eos=True) for i in range(10)]
    engine = make_engine(replace(STATIC, max_num_seqs=8, blocks=30, optimistic=True))
    plans = steps_of(engine, rows)
    assert engine.stats.preemptions > 0
    sizes = [len(plan.slots) for plan in plans]
    assert len(batches_of(plans)) >= 3
    assert max(sizes) == 8


SWITCHED = [
    Setup(kv_cache=kv, paged=paged, continuous=continuous, prefix=prefix, max_model_len=40, blocks=81)
    for kv, paged, continuous, prefix in itertools.product((True, False), repeat=4)
]


@pytest.mark.parametrize("setup", SWITCHED, ids=lambda s: f"kv={s.kv_cache:d} paged={s.paged:d} cont={s.continuous:d} prefix={s.prefix:d}")
def test_a_row_that_breaks_the_engine_fails_alone(setup: Setup) -> None:
    engine = make_engine(setup)
    forward = engine.runner.forward

    def breaks(spans: list[Span]) -> Any:
        if any(table.tokens[span.slot, 0] == 25 and table.num_tokens[span.slot] > 4 for span in spans):
            raise RuntimeError("a kernel broke")
        return forward(spans)

    table = engine.memory.table
    assert isinstance(engine.runner, HistoryModel)
    engine.runner.forward = breaks  # type: ignore[method-assign]
    rows = [request(i, "z" if i % 5 == 0 else "abc", max_tokens=9, ignore_eos=True) for i in range(12)]
    results = run_checked(engine, rows)
    assert {row for row, result in results.items() if result.error} == {0, 5, 10}
    good = run_checked(make_engine(Setup()), rows)
    assert all(results[i].token_ids.tolist() == good[i].token_ids.tolist() for i in range(12) if i % 5)
