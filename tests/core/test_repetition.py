"""A row that repeats itself ends at exactly the token where its last N are one piece three times or more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.core.plan import StepResult
from batchinfer.core.repetition import REPEATS
from batchinfer.core.request import FinishReason, Request, SamplingParams
from batchinfer.core.sequences import Sequence, SequenceTable
from batchinfer.core.stop import GOES_ON, LENGTH, REPETITION, StopChecker
from batchinfer.errors import InputError
from tests.fakes import LETTERS, Setup, make_engine, request, run_checked


def repeats(output: list[int], window: int) -> bool:
    """The definition, word for word."""
    if len(output) < window:
        return False
    tail = output[-window:]
    return any(tail[p:] == tail[:-p] for p in range(1, window // REPEATS + 1))


def end_of(output: list[int], window: int) -> int | None:
    return next((n for n in range(1, len(output) + 1) if repeats(output[:n], window)), None)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=30, max_size=30), st.sampled_from([0, 3, 6, 7, 12])), min_size=1, max_size=4),
    st.integers(0, 29),
)
def test_rows_end_where_the_definition_says(rows: list[tuple[list[int], int]], preempted_at: int) -> None:
    """Side by side, each with a window of its own, and one of them leaving and coming back meanwhile."""
    table = SequenceTable(8, 64, 16)
    checker = StopChecker(table, LETTERS)
    ends: dict[int, int] = {}
    seqs = []
    for index, (_, window) in enumerate(rows):
        ids = np.array([0, 1], np.int32)
        seqs.append(Sequence(index, Request(index, ids, SamplingParams(stop_repetition=window, ignore_eos=True)), 60, False))
        table.admit(seqs[-1], 0)
        checker.admit(seqs[-1])
    for step in range(30):
        if step == preempted_at:
            seq = seqs[0]
            output, slot = table.output_of(seq.slot), np.array([seq.slot])
            checker.forget(slot)
            table.remove(slot)
            seq.output_ids = output
            table.admit(seq, 0)
            checker.admit(seq)
        slots = np.array([seq.slot for seq in seqs], np.int32)
        tokens = np.array([output[step] for output, _ in rows], np.int32)
        table.append(slots, tokens)
        for index, verdict in enumerate(checker.check(slots, tokens)):
            if verdict == REPETITION:
                ends.setdefault(index, step + 1)
    assert ends == {index: end for index, (output, window) in enumerate(rows) if window and (end := end_of(output, window))}


def test_drafts_accepted_beyond_the_end_are_not_appended() -> None:
    table = SequenceTable(2, 64, 16)
    checker = StopChecker(table, LETTERS)
    seq = Sequence(0, Request(0, np.array([9], np.int32), SamplingParams(stop_repetition=6)), 40, False)
    table.admit(seq, 0)
    checker.admit(seq)
    tokens = np.array([1, 2, 1, 2, 1, 2, 1, 2], np.int32)
    added, verdicts = checker.append(np.array([seq.slot], np.int32), StepResult(tokens, np.array([8], np.int32)))
    assert (added.tolist(), verdicts.tolist()) == ([6], [REPETITION])


def test_the_prompt_does_not_count_and_min_tokens_waits() -> None:
    table = SequenceTable(2, 64, 16)
    checker = StopChecker(table, LETTERS)
    params = SamplingParams(stop_repetition=3, min_tokens=5, max_tokens=7)
    seq = Sequence(0, Request(0, np.array([1] * 9, np.int32), params), 16, False)
    table.admit(seq, 0)
    checker.admit(seq)
    slots, found = np.array([seq.slot], np.int32), []
    for _ in range(7):
        table.append(slots, np.array([1], np.int32))
        found.append(int(checker.check(slots, np.array([1], np.int32))[0]))
    assert found == [GOES_ON] * 4 + [REPETITION] * 3
    assert LENGTH not in found


def test_a_run_with_repetition_says_so() -> None:
    engine = make_engine(Setup(num_tokens=1))  # a model that knows one word
    results = run_checked(engine, [request(0, "abc", stop_repetition=9, max_tokens=50), request(1, "abc", max_tokens=20)])
    assert (results[0].finish_reason, len(results[0].token_ids)) == (FinishReason.REPETITION, 9)
    assert (results[1].finish_reason, len(results[1].token_ids)) == (FinishReason.LENGTH, 20)
    assert results[0].text == "a" * 9
    with pytest.raises(InputError, match="stop_repetition=2 is out of range"):
        SamplingParams(stop_repetition=2).check()


def test_how_rows_are_batched_does_not_move_the_end() -> None:
    """Preempted, alone, in chunks, or beside others: the same tokens and the same end."""
    rows = [request(row, "abcdefgh"[: 1 + row % 8] * 2, stop_repetition=6 + row % 5, max_tokens=60, ignore_eos=True) for row in range(24)]
    outcomes = []
    for setup in (
        Setup(num_tokens=2),
        Setup(num_tokens=2, max_num_seqs=1, grouped=False),
        Setup(num_tokens=2, blocks=40, optimistic=True),
        Setup(num_tokens=2, budget=9, prefix=False),
    ):
        engine = make_engine(setup)
        results = run_checked(engine, rows)
        outcomes.append([(results[row].finish_reason, results[row].token_ids.tolist()) for row in range(24)])
        assert engine.stats.preemptions or not setup.optimistic
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert sum(reason is FinishReason.REPETITION for reason, _ in outcomes[0]) > 3
    for item, (reason, output) in zip(rows, outcomes[0], strict=True):
        end = end_of(output, item.params.stop_repetition)
        assert end == (len(output) if reason is FinishReason.REPETITION else None)
