"""A row that makes the engine fail costs itself, and nobody else a token."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchinfer.core.request import Request, Result, SamplingParams
from batchinfer.errors import EngineFault
from tests.engine.engines import build, ids, open_tiny, run_all
from tests.fakes import Setup, Span, make_engine, request, run_checked
from tests.oracle.tiny_models import write_tiny

POISON = 25  # the letter z


def poisoned(model: Any, error: Exception) -> None:
    """Make the fake model's forward pass fail whenever a batch holds the poison token."""
    inner, table = model.forward, model._table

    def forward(spans: list[Span]) -> Any:
        if any(POISON in table.tokens[span.slot, span.start : span.start + span.count] for span in spans):
            raise error
        return inner(spans)

    model.forward = forward


def rows(poison: tuple[int, ...]) -> list[Request]:
    return [request(i, ("abcdefgh" * 3)[: 5 + i] + ("z" if i in poison else "y"), max_tokens=9, ignore_eos=True) for i in range(16)]


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("error", [RuntimeError("kernel failed"), AssertionError("shape"), MemoryError("out of memory")])
def test_the_culprits_fail_and_the_others_are_untouched(error: Exception, prefix: bool) -> None:
    setup = Setup(prefix=prefix, budget=40, num_tokens=20)  # answers never hold the poison themselves
    expected = run_checked(make_engine(setup), rows(()))
    engine = make_engine(setup)
    poisoned(engine.runner, error)
    notices: list[str] = []
    engine.on_notice = notices.append
    got = run_checked(engine, rows((3, 11)))
    for row, result in got.items():
        if row in (3, 11):
            assert result.error is not None
            assert result.error.code == ("out_of_memory" if isinstance(error, MemoryError) else "engine_error")
            assert str(error) in result.error.message
        else:
            assert result.token_ids.tolist() == expected[row].token_ids.tolist(), row
    word = "memory ran out" if isinstance(error, MemoryError) else "test_isolation.py"
    assert all(word in notice for notice in notices)
    assert notices


def test_a_fault_of_the_engine_ends_the_job_instead_of_failing_every_row() -> None:
    engine = make_engine(Setup(max_num_seqs=16, budget=400))

    def broken(plan: list[Span]) -> Any:
        raise RuntimeError("the device is gone")

    engine.runner.forward = broken  # type: ignore[method-assign]
    with pytest.raises(EngineFault, match="the device is gone"):
        run_checked(engine, rows(()) + rows(()))


def test_one_row_that_is_too_much_at_once_is_computed_in_smaller_pieces() -> None:
    """Nobody fails, and later rows run side by side again."""
    setup = Setup(budget=64, max_num_seqs=8, num_tokens=20, blocks=400)
    long = request(0, [1 + i % 19 for i in range(60)], max_tokens=4, ignore_eos=True)
    later = [request(i, [i % 20, 3, 5], max_tokens=40, ignore_eos=True) for i in range(1, 200)]
    expected = run_checked(make_engine(setup), [long, *later])
    engine = make_engine(setup)
    inner = engine.runner.forward
    widest: list[int] = []

    def forward(plan: list[Span]) -> Any:
        if max(span.count for span in plan) > 20:
            raise MemoryError("can't allocate memory")
        widest.append(len(plan))
        return inner(plan)

    engine.runner.forward = forward  # type: ignore[method-assign]
    got = run_checked(engine, [long, *later])
    assert {r: x.token_ids.tolist() for r, x in got.items()} == {r: x.token_ids.tolist() for r, x in expected.items()}
    assert max(widest[:-1]) == 8, "the batch never recovered"


def test_a_failed_step_is_let_go_before_it_is_tried_again() -> None:
    engine = make_engine(Setup(num_tokens=20))
    inner = engine.runner.forward
    held: list[weakref.ref[Any]] = []
    alive: list[bool] = []

    class Activations(list[int]):
        pass

    def forward(plan: list[Span]) -> Any:
        alive.extend(ref() is not None for ref in held)
        activations = Activations(inner(plan))
        if len(plan) > 1:
            held.append(weakref.ref(activations))
            raise MemoryError("out of memory")
        return activations

    engine.runner.forward = forward  # type: ignore[method-assign]
    run_checked(engine, rows(()))
    assert held
    assert not any(alive)


def test_memory_that_runs_out_shrinks_the_batch_and_nobody_fails() -> None:
    setup = Setup(budget=64, max_num_seqs=16, num_tokens=20)
    expected = run_checked(make_engine(setup), rows(()))
    engine = make_engine(setup)
    inner = engine.runner.forward
    sizes: list[int] = []

    def forward(plan: list[Span]) -> Any:
        sizes.append(sum(span.count for span in plan))
        if sizes[-1] > 24:
            raise MemoryError("can't allocate memory")
        return inner(plan)

    engine.runner.forward = forward  # type: ignore[method-assign]
    got = run_checked(engine, rows(()))
    assert {r: x.token_ids.tolist() for r, x in got.items()} == {r: x.token_ids.tolist() for r, x in expected.items()}
    assert max(sizes) > 24
    assert sum(size > 24 for size in sizes) <= 3, "the budget did not shrink"


def test_nan_logits_fail_their_row_and_leave_no_nan_behind(tmp_path: Path) -> None:
    """A token whose embedding is NaN poisons its row's KV; the blocks are used again by others."""
    model = open_tiny(write_tiny(tmp_path / "tiny", "llama2"))
    bad_token = 200
    prompts = [[1 + i, 2, 3, 4, 5, 6, 7, 8, 9] * 3 for i in range(12)]
    good = [Request(i, ids(p), SamplingParams(max_tokens=10, ignore_eos=True)) for i, p in enumerate(prompts)]
    expected = run_all(build(model, block_size=16), good)

    # One healthy row draws with noise and must not end early: its ban on EOS may not be lifted by a neighbour.
    good[3] = Request(3, good[3].prompt_ids, SamplingParams(max_tokens=10, min_tokens=10, temperature=1e5))
    expected[3] = run_all(build(model, block_size=16), [good[3]])[3]
    mixed = list(good)
    for i in (2, 5, 6):
        mixed[i] = Request(i, ids([*prompts[i][:20], bad_token, 4]), good[i].params)
    engine = build(model, block_size=16, num_kv_blocks=9, max_num_seqs=3)
    engine.runner._decoder._embed[bad_token] = torch.nan  # type: ignore[attr-defined]
    got: dict[int, Result] = run_all(engine, mixed)
    for i, result in got.items():
        if i in (2, 5, 6):
            assert result.error is not None
            assert result.error.code == "non_finite_logits"
        elif bad_token not in expected[i].token_ids:
            assert np.array_equal(result.token_ids, expected[i].token_ids), i
