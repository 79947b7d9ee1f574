"""Workloads: seeded, with the lengths that they promise; and the host-cost scenario's steps."""

from __future__ import annotations

import numpy as np

from batchinfer.core.stats import StepShape
from batchinfer.core.vocabulary import Vocabulary
from batchinfer.reports.bench import StepLog
from batchinfer.reports.host_cost import HostCost, StepTime, decode_steps, steady_steps
from batchinfer.reports.workload import chat_mix, churn_mix

VOCABULARY = Vocabulary([bytes([65 + i % 26]) for i in range(300)] + [b"", b"<s>"], frozenset({301}), (301,))


def test_mixes_are_seeded_and_hold_ordinary_tokens() -> None:
    for make in (lambda seed: chat_mix(VOCABULARY, seed), lambda seed: churn_mix(VOCABULARY, 50, seed)):
        first, again, other = make(1), make(1), make(2)
        assert all(np.array_equal(a.prompt_ids, b.prompt_ids) for a, b in zip(first.requests, again.requests, strict=True))
        assert [r.params for r in first.requests] == [r.params for r in again.requests]
        assert any(not np.array_equal(a.prompt_ids, b.prompt_ids) for a, b in zip(first.requests, other.requests, strict=True))
        assert max(int(r.prompt_ids.max()) for r in first.requests) < 300
        assert [r.row for r in first.requests] == list(range(len(first.requests)))


def test_the_chat_mix_fits_a_short_context_and_shares_beginnings() -> None:
    requests = chat_mix(VOCABULARY, 0, rows=64, longest=256).requests
    assert all(len(r.prompt_ids) + r.params.max_tokens <= 256 for r in requests)
    beginnings = [r.prompt_ids[:80].tobytes() for r in requests[1::2]]
    assert len(set(beginnings)) <= 4


def test_the_churn_mix_is_the_stated_one() -> None:
    requests = churn_mix(VOCABULARY, 400, 0, ["a", "b"]).requests
    lengths = [len(r.prompt_ids) for r in requests]
    outputs = [r.params.max_tokens for r in requests]
    assert (min(lengths) >= 100, max(lengths) <= 700, min(outputs) >= 100, max(outputs) <= 300) == (True,) * 4
    assert len({r.prompt_ids[:64].tobytes() for r in requests[1::2]}) <= 16
    assert len({r.prompt_ids[:64].tobytes() for r in requests[::2]}) == 200
    assert all(r.params.stop == ("a", "b") for r in requests)


def test_steps_are_told_apart() -> None:
    filling = [StepTime(9.0, 5, 0, 100, n) for n in range(0, 100, 10)]
    steady = [StepTime(2.0, 1, 1, 30, 100)] * 40
    decoding = [StepTime(1.0, 0, 0, 0, 100)] * 10
    draining = [StepTime(1.0, 0, 3, 0, n) for n in range(85, 0, -5)]
    steps = filling + steady + decoding + draining
    assert {s.milliseconds for s in steady_steps(steps, 100)} == {2.0}
    assert {s.milliseconds for s in decode_steps(steps, 100)} == {1.0}
    assert len(decode_steps(steps, 100)) == 10


def test_a_scenario_that_never_filled_is_null_in_json() -> None:
    cost = HostCost(64, float("nan"), 1.0, 2.0, evicted=False, preemptions=0, steps=0, speed=2.0)
    found = cost.as_dict()
    assert (found["steady_ms"], found["pure_decode_ms"], found["scaled"]["pure_decode_ms"]) == (None, 1.0, 0.5)


def test_inter_token_latency_weighs_steps_by_their_rows() -> None:
    log = StepLog()
    assert log.inter_token_ms() == {}
    for seconds, rows in ((0.001, 98), (0.010, 1), (0.100, 1)):
        log(StepShape(rows, 0, rows, 0, 0.0, seconds))
    assert log.inter_token_ms() == {"p50": 1.0, "p90": 1.0, "p99": 10.0}
