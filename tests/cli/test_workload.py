"""Workloads: seeded, with the lengths that they promise; files read as `run` reads them; and the host-cost scenario's steps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.core.vocabulary import Vocabulary
from batchinfer.errors import InputFileError
from batchinfer.reports.host_cost import HostCost, StepTime, decode_steps, steady_steps
from batchinfer.reports.mixes import MIXES, churn_mix, make_mix
from batchinfer.reports.workload import read_workload
from tests.engine.engines import open_tiny

VOCABULARY = Vocabulary([bytes([65 + i % 26]) for i in range(300)] + [b"", b"<s>"], frozenset({301}), (301,))


class Characters:
    """A tokenizer with one token for each character."""

    has_chat_template = True

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        return [[ord(c) for c in text] for text in texts]

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


@pytest.mark.parametrize("name", MIXES)
def test_mixes_are_seeded_and_fit_their_context(name: str) -> None:
    first, again, other = (make_mix(name, Characters(), 20, seed, 4096) for seed in (1, 1, 2))
    assert all(np.array_equal(a.prompt_ids, b.prompt_ids) for a, b in zip(first.requests, again.requests, strict=True))
    assert [r.params for r in first.requests] == [r.params for r in again.requests]
    assert any(not np.array_equal(a.prompt_ids, b.prompt_ids) for a, b in zip(first.requests, other.requests, strict=True))
    assert [r.row for r in first.requests] == list(range(20))
    assert all(length < 512 for length in make_mix(name, Characters(), 20, 1, 512).lengths)
    assert all(r.params.ignore_eos for r in first.requests)
    assert len(make_mix(name, Characters()).requests) == MIXES[name].rows


def test_mixes_have_their_shapes() -> None:
    def lengths(name: str) -> tuple[float, float]:
        requests = make_mix(name, Characters(), 40, longest=40_000).requests
        return float(np.mean([len(r.prompt_ids) for r in requests])), float(np.mean([r.params.max_tokens for r in requests]))

    chat, prefix, long, short = (lengths(name) for name in ("chat", "shared-prefix", "long-prompt", "short-answer"))
    assert long[0] > 3 * chat[0]
    assert short[1] <= 16 < prefix[1] < chat[1]
    beginnings = [r.prompt_ids[:1500].tobytes() for r in make_mix("shared-prefix", Characters(), 40).requests]
    assert len(set(beginnings)) == 1
    systems = {r.prompt_ids[:200].tobytes() for r in make_mix("chat", Characters(), 80).requests[1::2]}
    assert len(systems) <= 4


def test_the_churn_mix_is_the_stated_one() -> None:
    requests = churn_mix(VOCABULARY, 400, 0, ["a", "b"]).requests
    lengths = [len(r.prompt_ids) for r in requests]
    outputs = [r.params.max_tokens for r in requests]
    assert (min(lengths) >= 100, max(lengths) <= 700, min(outputs) >= 100, max(outputs) <= 300) == (True,) * 4
    assert len({r.prompt_ids[:64].tobytes() for r in requests[1::2]}) <= 16
    assert len({r.prompt_ids[:64].tobytes() for r in requests[::2]}) == 200
    assert all(r.params.stop == ("a", "b") for r in requests)
    assert max(int(r.prompt_ids.max()) for r in requests) < 300


def test_a_part_has_fewer_rows_and_shorter_outputs() -> None:
    whole = make_mix("chat", Characters(), 20)
    part = whole.part(5, 0.5, most_output=40)
    assert len(part.requests) == 5
    for mine, full in zip(part.requests, whole.requests, strict=False):
        assert np.array_equal(mine.prompt_ids, full.prompt_ids)
        assert mine.params.max_tokens == min(40, max(2, round(full.params.max_tokens * 0.5)))
    assert whole.part(99).requests == whole.requests


ROWS = [{"prompt": "abc", "max_tokens": 7}, {"prompt": "", "max_tokens": 3}, {"prompt_token_ids": [1, 2, 3]}]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_workload_file_is_read_as_run_reads_it(tiny_folder: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"in{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        pq.write_table(
            pa.Table.from_pylist(
                ROWS, pa.schema({"prompt": pa.string(), "max_tokens": pa.int64(), "prompt_token_ids": pa.list_(pa.int64())})
            ),
            path,
        )
    found = read_workload(path, open_tiny(tiny_folder))
    assert [r.params.max_tokens for r in found.workload.requests] == [7, 512]
    assert found.workload.requests[1].prompt_ids.tolist() == [1, 2, 3]
    assert [r.row for r in found.workload.requests] == [0, 1]
    assert found.left_out == 1
    assert "prompt is empty" in found.first_error
    assert len(read_workload(path, open_tiny(tiny_folder), 1).workload.requests) == 1


def test_a_system_column_becomes_a_message(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"system": "be brief", "prompt": "hello"}\n')
    model = open_tiny(tiny_folder)
    if not model.tokenizer.has_chat_template:
        pytest.skip("the tiny model has no chat template")
    [request] = read_workload(path, model).workload.requests
    assert "be brief" in model.tokenizer.decode(request.prompt_ids.tolist(), skip_special_tokens=False)


def test_a_file_without_a_row_that_runs_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": ""}\n')
    with pytest.raises(InputFileError, match="no rows that can run; the first: line 1: prompt is empty"):
        read_workload(path, open_tiny(tiny_folder))


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
