"""Jobs whose rows must call a tool, on tiny models of each way of writing calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate

from batchinfer import LLM, SamplingParams
from batchinfer.errors import InputError
from batchinfer.io.chat_options import ChatOptions
from tests.cli.conftest import Cli
from tests.job.world import read_jsonl, write_jsonl
from tests.oracle.tiny_models import write_tiny
from tests.structured.test_calls import TOOLS, WEATHER


def tiny_with(folder: Path, marks: list[str], template: str) -> Path:
    """A tiny model whose last merges are special tokens instead."""
    write_tiny(folder, "llama3.2")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for mark in marks:
        merge = tokenizer["model"]["merges"].pop()
        index = tokenizer["model"]["vocab"].pop("".join(merge if isinstance(merge, list) else merge.split(" ")))
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": index, "content": mark, "special": True})
    tokenizer["added_tokens"].sort(key=lambda token: token["id"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] += template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    "marks, comment", [([], "{# <tool_call> #}"), (["[TOOL_CALLS]"], ""), (["[TOOL_CALLS]", "[ARGS]"], ""), ([], "{# <|python_tag|> #}")]
)
def test_rows_of_a_job_call_their_tools(cli: Cli, tmp_path: Path, marks: list[str], comment: str) -> None:
    model = tiny_with(tmp_path / "m", marks, comment)
    talk = {"messages": [{"role": "user", "content": "How is the weather?"}], "tools": TOOLS, "max_tokens": 150}
    named = {"type": "function", "function": {"name": "weather"}}
    rows: list[dict[str, Any]] = [
        {**talk, "tool_choice": named},
        {**talk, "tool_choice": named, "stop": "city"},  # which ends what must not end there
        {**talk, "tool_choice": named, "temperature": 1.5, "n": 2, "response_format": {"type": "json_object"}, "stop": "@@"},
        {**talk, "tool_choice": named, "max_tokens": 5},
        {**talk, "tool_choice": {"type": "function", "function": {"name": "gone"}}},
        {**talk, "tool_choice": "auto"},
    ]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    assert cli("plan", source, "-m", model, "-q").err.endswith("5 rows can run, 1 cannot\n")
    said = cli("run", source, "-m", model, "-o", tmp_path / "out.jsonl", "-q", "--reasoning-split")
    assert said.code == 3, said.err
    found = read_jsonl(tmp_path / "out.jsonl")
    for row in (found[0], found[2]):
        assert row["finish_reason"] == "stop", row
        assert row["generated_text"] == ""
        [call] = row["tool_calls"]
        assert call["function"]["name"] == "weather"
        validate(json.loads(call["function"]["arguments"]), WEATHER)
    assert len(found[2]["all_tool_calls"]) == 2
    assert found[1]["error"]["code"] == "structured_output_invalid"
    assert (found[3]["finish_reason"], found[3]["tool_calls"]) == ("length", None)
    assert found[4]["error"]["code"] == "invalid_tools"
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": {**row, "temperature": 0}}
        for i, row in enumerate(rows[:1])
    ]
    assert cli("run", write_jsonl(tmp_path / "b.jsonl", lines), "-m", model, "-o", tmp_path / "b.out.jsonl", "-q").code == 0
    [choice] = read_jsonl(tmp_path / "b.out.jsonl")[0]["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == found[0]["tool_calls"]


def test_from_python_too(tmp_path: Path) -> None:
    llm = LLM(tiny_with(tmp_path / "m", ["[TOOL_CALLS]"], ""), dtype="float32")
    talk = [{"role": "user", "content": "How is the weather?"}]
    called = ChatOptions(tuple(TOOLS), one_call=True, must_call=frozenset({"weather"}))
    for params in (None, SamplingParams(max_tokens=150), [SamplingParams(max_tokens=150)]):
        [result] = llm.chat([talk], params, options=called, progress=False)
        [call] = json.loads(result.text)
        assert call["name"] == "weather"
        validate(call["arguments"], WEATHER)
    [free] = llm.chat([talk], SamplingParams(max_tokens=4), progress=False)
    assert free.num_generated_tokens == 4
    with pytest.raises(InputError, match="not known"):
        LLM(write_tiny(tmp_path / "plain", "llama3.2")).chat([talk], options=called, progress=False)


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_model_that_writes_calls_in_no_known_way(cli: Cli, tiny_folder: Path, tmp_path: Path, command: str) -> None:
    talk = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "max_tokens": 2}
    source = write_jsonl(tmp_path / "in.jsonl", [{**talk, "tool_choice": "required"}, talk])
    said = cli(command, source, "-m", tiny_folder)
    assert said.code == 3
    assert "this model's way of writing them is not known; use auto or none" in " ".join(said.err.split())
