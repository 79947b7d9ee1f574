"""The types of OpenAI's own Python package read our response lines, and a batch file for its service runs as it is."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.request import FinishReason, Request, Result, RowError
from tests.job.test_openai import BAD, GOOD, chat
from tests.job.world import World, read_jsonl, write_jsonl

openai = pytest.importorskip("openai")

# As https://platform.openai.com/docs/guides/batch writes it, with the fields that such files carry.
FOR_THE_SERVICE = """\
{"custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "gpt-4o-mini", "messages": [{"role": "system", "content": "You are a helpful assistant."},{"role": "user", "content": "Hello world!"}],"max_tokens": 10}}
{"custom_id": "request-2", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": " world"}], "name": "bob"}], "max_completion_tokens": 10, "temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": ["\\n\\n"], "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logprobs": false, "user": "u-1", "metadata": {"topic": "demo"}, "store": true, "service_tier": "default", "response_format": {"type": "text"}}}
{"custom_id": "request-3", "method": "POST", "url": "/v1/completions", "body": {"model": "gpt-3.5-turbo-instruct", "prompt": "Say this is a test", "max_tokens": 7, "temperature": 0, "stream": false, "echo": false, "best_of": 1, "suffix": null, "user": "u-1"}}
"""


def check_answer(line: dict[str, Any]) -> None:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    assert set(line) == {"id", "custom_id", "response", "error"}
    body = line["response"]["body"]
    kind = ChatCompletion if body["object"] == "chat.completion" else Completion
    parsed = kind.model_validate(body, strict=True)
    assert json.loads(parsed.model_dump_json(exclude_unset=True)) == body
    assert parsed.usage is not None
    assert parsed.usage.total_tokens == parsed.usage.prompt_tokens + parsed.usage.completion_tokens
    assert parsed.usage.completion_tokens > 0


def check_failure(line: dict[str, Any], status: int) -> None:
    from openai.types.shared import ErrorObject

    assert line["response"]["status_code"] == status
    error = ErrorObject.model_validate(line["response"]["body"]["error"], strict=True)
    assert error.type == ("server_error" if status == 500 else "invalid_request_error")
    assert error.message


def test_every_line_is_read(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [*GOOD, *(row for row, _ in BAD)])
    World().run(source, tmp_path / "out.jsonl", {})
    answers, errors = read_jsonl(tmp_path / "out.jsonl"), read_jsonl(tmp_path / "out.errors.jsonl")
    assert (len(answers), len(errors)) == (len(GOOD), len(BAD))
    for line in answers:
        check_answer(line)
    for line in errors:
        check_failure(line, 400)


def test_a_file_for_the_service_runs_unchanged(tmp_path: Path) -> None:
    source = tmp_path / "batch.jsonl"
    source.write_text(FOR_THE_SERVICE)
    world = World()
    report = world.run(source, tmp_path / "out.jsonl", {})
    assert report.exit_code == 0, report.first_errors
    answers = read_jsonl(tmp_path / "out.jsonl")
    assert [line["custom_id"] for line in answers] == ["request-1", "request-2", "request-3"]
    for line in answers:
        check_answer(line)
    assert sum("gpt-4o-mini" in note for note in world.notes) == 1
    assert "name" not in world.prompts[0]


class Breaking:
    """An engine that fails some rows, as a kernel error or a lack of memory would."""

    def __init__(self, engine: Any, codes: list[str]) -> None:
        self._engine, self._codes = engine, itertools.cycle(codes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, requests: Any) -> Any:
        def some() -> Any:
            for item in requests:
                if isinstance(item, Request) and item.row % 3 == 1:
                    error = RowError(next(self._codes), "the kernel failed")
                    yield Result(item.row, "", FinishReason.ERROR, item.prompt_ids[:0], len(item.prompt_ids), error=error)
                else:
                    yield item

        return self._engine.run(some())


def test_our_faults_are_500_and_can_be_tried_again(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [*(chat(f"row-{i}", f"text {i}") for i in range(9)), chat("bad", stream=True)])
    codes = ["engine_error", "out_of_memory", "internal_error"]
    world = World()
    build = world._build
    world._build = lambda *given: Breaking(build(*given), codes)  # type: ignore[method-assign]
    assert world.run(source, tmp_path / "out.jsonl", {}).rows_failed == 4
    errors = read_jsonl(tmp_path / "out.errors.jsonl")
    assert [line["response"]["body"]["error"]["code"] for line in errors] == [*codes, "unsupported_parameter"]
    for line, status in zip(errors, (500, 500, 500, 400), strict=True):
        check_failure(line, status)
    again = World()
    assert again.run(source, tmp_path / "out.jsonl", {}, retry_errors=True).rows_failed == 1
    assert again.rows_run == 3
    World().run(source, tmp_path / "whole.jsonl", {})
    for name in ("jsonl", "errors.jsonl"):
        assert (tmp_path / f"out.{name}").read_bytes() == (tmp_path / f"whole.{name}").read_bytes()
