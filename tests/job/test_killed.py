"""Jobs killed in the middle whose rows carry everything that a row may ask for: going on gives the undisturbed bytes."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.test_tool_choice import tiny_with
from tests.job.chaos import Disturbed, Model
from tests.job.world import leftovers, read_jsonl, write_jsonl
from tests.structured.test_calls import TOOLS

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
THINKING = [{"role": "user", "content": "Think."}, {"role": "assistant", "content": "<think>"}]
KINDS: list[dict[str, Any]] = [
    {"n": 3, "logprobs": 2, "temperature": 1.0},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}, "max_tokens": 150},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "max_tokens": 80, "temperature": 0.9, "n": 2},
    {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}, "logprobs": 0, "prompt_logprobs": 1},
    {"messages": THINKING, "continue_final_message": True, "add_generation_prompt": False},
    {"tools": TOOLS, "tool_choice": "auto", "repetition_penalty": 1.2},
    {"tools": TOOLS, "tool_choice": "required", "temperature": 1.0, "n": 2, "max_tokens": 100},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
    {"tool_choice": "required"},
]
NUM_ROWS = 27


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tiny_with(tmp_path_factory.mktemp("killed") / "m", ["[TOOL_CALLS]"], "")
    return Model("tiny", (f"--model={folder}", "--dtype=float32", "--asked", "--max-tokens=12"), NUM_ROWS)


def rows() -> list[dict[str, Any]]:
    made = []
    for i in range(NUM_ROWS):
        asked = KINDS[i % len(KINDS)]
        said = {} if "messages" in asked else {"messages": [{"role": "user", "content": f"Row {i}, please."}]}
        made.append({"id": f"row {i}", **said, **asked})
    return made


def write_source(folder: Path, kind: str) -> Path:
    if kind == "openai":
        lines = [
            {"custom_id": row.pop("id"), "method": "POST", "url": "/v1/chat/completions", "body": row | {"logprobs": "logprobs" in row}}
            for row in rows()
        ]
        return write_jsonl(folder / "in.jsonl", lines)
    if kind == "jsonl":
        return write_jsonl(folder / "in.jsonl", rows())
    names = list(dict.fromkeys(name for row in rows() for name in row))
    texts = ("messages", "tools", "tool_choice", "response_format", "structured_outputs")
    columns = {name: [json.dumps(row[name]) if name in texts and name in row else row.get(name) for row in rows()] for name in names}
    pq.write_table(pa.table(columns), folder / "in.parquet", row_group_size=7)
    return folder / "in.parquet"


def killed_in_the_middle(job: Disturbed, count: int, *flags: str) -> set[int]:
    """The rows that stood in the partial file when the process was killed, by SIGKILL and while it ran."""
    process = job.start("--step-seconds=0.02", *flags)
    job.wait_for(process, count)
    assert process.poll() is None, process.communicate()[1].decode()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not job.output.exists()
    stored = job.stored()
    assert count <= len(stored) < NUM_ROWS
    return stored


@pytest.mark.parametrize("kind, ending", [("jsonl", "jsonl"), ("parquet", "parquet"), ("openai", "jsonl")])
def test_a_killed_job_goes_on_to_the_same_bytes(tmp_path: Path, model: Model, kind: str, ending: str) -> None:
    source = write_source(tmp_path, kind)
    whole = Disturbed(tmp_path, source, tmp_path / f"whole.{ending}", random.Random(1), model)
    flags = () if kind == "openai" else ("--token-ids",)
    code, told = whole.end(*flags)
    assert code == 3, told
    job = Disturbed(tmp_path, source, tmp_path / f"out.{ending}", random.Random(2), model)
    stored = killed_in_the_middle(job, 12, *flags)
    code, told = job.end(*flags)
    assert code == 3, told
    assert int(told.rsplit("ran ", 1)[1]) <= answers_of(set(range(NUM_ROWS)) - stored), "nothing is computed twice"
    assert job.output.read_bytes() == whole.output.read_bytes()
    if kind == "openai":
        assert (tmp_path / "out.errors.jsonl").read_bytes() == (tmp_path / "whole.errors.jsonl").read_bytes()
    assert leftovers(job.output) == []
    check_asked(read_jsonl(job.output) if ending == "jsonl" else pq.read_table(job.output).to_pylist(), kind)


def answers_of(positions: set[int]) -> int:
    return sum(KINDS[i % len(KINDS)].get("n", 1) for i in positions)


def check_asked(found: list[dict[str, Any]], kind: str) -> None:
    """What the rows asked for is there at all."""
    if kind == "openai":
        bodies = [line["response"]["body"] for line in found]
        assert len(bodies) == NUM_ROWS * 7 // 9
        assert [choice["finish_reason"] for choice in bodies[1]["choices"]] == ["tool_calls"]
        assert len(bodies[0]["choices"]) == 3
        assert bodies[4]["choices"][0]["message"]["reasoning_content"]
        assert bodies[3]["prompt_logprobs"]
        return
    assert [row["id"] for row in found] == [f"row {i}" for i in range(NUM_ROWS)]
    several, calls, structured, choice, thinking, _, required, no_schema, no_tools = found[:9]
    assert len(several["generated_texts"]) == len(several["all_output_logprobs"]) == 3
    assert calls["tool_calls"][0]["function"]["name"] == "weather"
    assert {frozenset(json.loads(text)) for text in structured["generated_texts"]} == {frozenset("ab")}
    assert choice["generated_text"] in ("yes", "no", "perhaps")
    assert choice["output_prompt_logprobs"]
    assert thinking["reasoning"]
    assert len(required["all_tool_calls"]) == 2
    assert no_schema["error"]["code"] == "unsupported_schema"
    assert no_tools["error"]["code"] == "invalid_tools"


def test_metrics_of_finished_rows_outlive_a_kill(tmp_path: Path, model: Model) -> None:
    """They are times, so that only the rest of a row can be compared."""
    source = write_source(tmp_path, "jsonl")
    whole = Disturbed(tmp_path, source, tmp_path / "whole.jsonl", random.Random(1), model)
    assert whole.end("--metrics")[0] == 3
    job = Disturbed(tmp_path, source, tmp_path / "out.jsonl", random.Random(2), model)
    stored = killed_in_the_middle(job, 12, "--metrics")
    before = {line["row"]: line["result"]["metrics"] for line in map(json.loads, job.partial.read_bytes().splitlines()[: len(stored)])}
    assert job.end("--metrics")[0] == 3
    found = read_jsonl(job.output)
    metrics = [row.pop("metrics") for row in found]
    assert found == [{name: value for name, value in row.items() if name != "metrics"} for row in read_jsonl(whole.output)]
    assert {row: metrics[row] for row in before} == before
    assert [told is None for told in metrics] == [row["error"] is not None for row in found]
