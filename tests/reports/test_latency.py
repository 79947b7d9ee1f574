"""Waits for tokens, from hand-made steps."""

from __future__ import annotations

import numpy as np
import pytest

from batchinfer.core.stats import StepShape
from batchinfer.reports.latency import LatencyLog, in_ms


class Steps:
    """A clock, and steps that take the time that they are told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log = LatencyLog(lambda: self.now)

    def step(self, seconds: float, rows: dict[float, int], joined: tuple[float, ...] = (), first: tuple[float, ...] = ()) -> None:
        """`rows`: tokens emitted by row; 3.2 is the third answer to row 3."""
        self.now += seconds
        names = np.array(list(rows), np.float64)
        choices = np.rint(names % 1 * 10).astype(np.int32)
        shape = StepShape(
            0, 0, 0, 0, 0.0, seconds, rows=names.astype(np.int64), choices=choices, admitted=np.isin(names, joined),
            emitted=np.array(list(rows.values()), np.int32), first=np.isin(names, first),
        )  # fmt: skip
        self.log(shape)


def test_nothing_happened() -> None:
    log = LatencyLog()
    log(StepShape(0, 0, 0, 0, 0.0, 1.0))
    assert log.ttft is None
    assert log.itl is None


def test_first_tokens_count_from_admission() -> None:
    steps = Steps()
    steps.step(1.0, {0: 0}, joined=(0,))  # a prompt in two chunks
    steps.step(2.0, {0: 1, 7: 1}, joined=(7,), first=(0, 7))
    assert steps.log.ttft is not None
    assert (steps.log.ttft.count, steps.log.ttft.median) == (2, pytest.approx(2500))  # 3 s and 2 s
    assert steps.log.itl is None


def test_gaps_between_tokens_are_shared_by_what_arrives_at_once() -> None:
    steps = Steps()
    steps.step(1.0, {0: 1, 1: 1}, joined=(0, 1), first=(0, 1))
    steps.step(0.3, {0: 3, 1: 1})  # drafts accepted
    steps.now += 0.1  # the time between steps is waited for, too
    steps.step(0.2, {0: 0, 1: 1})  # row 0 is preempted, and waits
    steps.step(0.2, {0: 1})
    found = np.sort(np.concatenate(steps.log._token_waits))
    assert found == pytest.approx([0.1, 0.1, 0.1, 0.3, 0.3, 0.5])


def test_several_answers_to_a_row_wait_each_for_itself() -> None:
    steps = Steps()
    steps.step(1.0, {0: 1}, joined=(0,), first=(0,))
    steps.step(0.5, {0: 1, 0.1: 1}, joined=(0.1,), first=(0.1,))
    steps.step(0.25, {0: 0, 0.1: 1})
    steps.step(0.125, {0: 1, 0.1: 1})
    assert np.concatenate(steps.log._first_waits) == pytest.approx([1.0, 0.5])
    assert np.sort(np.concatenate(steps.log._token_waits)) == pytest.approx([0.125, 0.25, 0.375, 0.5])


def test_tokens_with_the_first_one_keep_nobody_waiting() -> None:
    steps = Steps()
    steps.step(1.0, {3: 4}, joined=(3,), first=(3,))
    assert steps.log.itl is not None
    assert (steps.log.itl.count, steps.log.itl.median) == (3, 0.0)


def test_percentiles() -> None:
    steps = Steps()
    steps.step(1.0, dict.fromkeys(range(100), 1), joined=tuple(range(100)), first=tuple(range(100)))
    for seconds in [0.01] * 49 + [1.0]:
        steps.step(seconds, dict.fromkeys(range(100), 1))
    itl = steps.log.itl
    assert itl is not None
    assert (itl.count, itl.median, itl.p99) == (5000, pytest.approx(10), pytest.approx(1000))
    assert itl.as_dict() == {"p50": 10.0, "p90": 10.0, "p99": 1000.0}
    assert itl.in_words() == "median 10 ms, 99th percentile 1,000 ms"
    assert in_ms(3.21) == "3.2 ms"
