"""OpenAI batch lines: answers in one file, errors in another, nothing ignored in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchinfer.errors import BatchInferError
from tests.job.world import World, leftovers, read_jsonl, write_jsonl


def line(custom_id: Any, body: dict[str, Any], url: str = "/v1/chat/completions", method: str = "POST") -> dict[str, Any]:
    return {"custom_id": custom_id, "method": method, "url": url, "body": {"model": "gpt-4o-mini", **body}}


def chat(custom_id: Any, text: str = "hi", **more: Any) -> dict[str, Any]:
    return line(custom_id, {"messages": [{"role": "user", "content": text}], "max_tokens": 5, **more})


def text(custom_id: Any, prompt: Any, **more: Any) -> dict[str, Any]:
    return line(custom_id, {"prompt": prompt, "max_tokens": 4, **more}, "/v1/completions")


BAD = [
    (chat(7), "invalid_custom_id"),
    (line("b", {"messages": []}), "empty_prompt"),
    (line("c", {}), "no_prompt"),
    (line("d", {"input": "x"}, "/v1/embeddings"), "invalid_url"),
    (line("e", {"messages": [{"role": "user", "content": "x"}]}, method="GET"), "invalid_method"),
    (chat("f", temprature=1), "unknown_parameter"),
    (chat("g", stream=True), "unsupported_parameter"),
    (chat("h", temperature="0"), "invalid_parameter"),
    (chat("i", tools=[{"type": "function"}]), "invalid_tools"),
    (chat("j", n=2, best_of=3), "unsupported_parameter"),
    (text("k", ["a", "b"]), "unsupported_parameter"),
    (text("l", ""), "empty_prompt"),
    ({"custom_id": "m", "url": "/v1/completions", "method": "POST", "body": []}, "invalid_body"),
    ({"prompt": "a plain row"}, "wrong_shape"),
    ("not json", "invalid_json"),
    (chat("n", "y" * 400), "too_long"),
]
GOOD = [
    chat("first", user="u", metadata={"a": 1}, store=False, service_tier="auto", stream=False, tools=None),
    chat("second", max_completion_tokens=2, max_tokens=None, temperature=0, top_p=1, n=1, response_format={"type": "text"}),
    text("third", "raw"),
    text("fourth", [1, 2, 3], echo=False),
    text("fifth", ["one"]),
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rows = [GOOD[0], *(row for row, _ in BAD[:8]), *GOOD[1:3], *(row for row, _ in BAD[8:]), *GOOD[3:]]
    return write_jsonl(tmp_path / "in.jsonl", rows)


def test_answers_and_errors(tmp_path: Path, source: Path) -> None:
    world = World()
    report = world.run(source, tmp_path / "out.jsonl", {})
    answers, errors = read_jsonl(tmp_path / "out.jsonl"), read_jsonl(tmp_path / "out.errors.jsonl")
    assert [answer["custom_id"] for answer in answers] == ["first", "second", "third", "fourth", "fifth"]
    assert report.exit_code == 3
    assert (report.rows_ok, report.rows_failed) == (5, len(BAD))
    for answer in answers:
        assert set(answer) == {"id", "custom_id", "response", "error"}
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        body = answer["response"]["body"]
        usage = body["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert body["choices"][0]["finish_reason"] in ("stop", "length")
    bodies = {answer["custom_id"]: answer["response"]["body"] for answer in answers}
    assert bodies["first"]["object"] == "chat.completion"
    assert bodies["first"]["choices"][0]["message"]["role"] == "assistant"
    assert bodies["second"]["usage"]["completion_tokens"] == 2
    assert bodies["third"]["usage"]["prompt_tokens"] == len("raw")
    assert bodies["third"]["object"] == "text_completion"
    assert isinstance(bodies["third"]["choices"][0]["text"], str)
    assert bodies["fifth"]["usage"]["prompt_tokens"] == len("one")
    assert [error["response"]["body"]["error"]["code"] for error in errors] == [code for _, code in BAD]
    assert all(error["response"]["status_code"] == 400 and error["error"] is None for error in errors)
    assert next(error for error in errors if error["custom_id"] is None and "raw" in error)["raw"] == "not json"
    assert len({entry["id"] for entry in answers + errors}) == len(answers) + len(errors)
    assert any("gpt-4o-mini" in note for note in world.notes)
    assert world.infos[0].defaults.temperature == 1.0
    assert leftovers(tmp_path / "out.jsonl") == []


def test_the_same_job_gives_the_same_bytes(tmp_path: Path, source: Path) -> None:
    for name in ("a", "b"):
        World(max_num_seqs=3 if name == "b" else 8).run(source, tmp_path / f"{name}.jsonl", {})
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert (tmp_path / "a.errors.jsonl").read_bytes() == (tmp_path / "b.errors.jsonl").read_bytes()


def test_goes_on_and_retries(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [chat(f"row-{i}", f"text {i % 5}") for i in range(30)])
    World().run(source, tmp_path / "whole.jsonl", {})
    whole = (tmp_path / "whole.jsonl").read_bytes()
    assert not (tmp_path / "whole.errors.jsonl").exists()
    output = tmp_path / "out.jsonl"
    with pytest.raises(KeyError):
        World(stop_after=12).run(source, output, {})
    World().run(source, output, {})
    assert output.read_bytes() == whole
    output = tmp_path / "again.jsonl"
    assert World(refuse="text 3").run(source, output, {}).rows_failed == 6
    assert len(read_jsonl(tmp_path / "again.errors.jsonl")) == 6
    world = World()
    world.run(source, output, {}, retry_errors=True)
    assert world.rows_run == 6
    assert output.read_bytes() == whole
    assert not (tmp_path / "again.errors.jsonl").exists()


def test_refusals(tmp_path: Path, source: Path) -> None:
    world = World()
    for match, output, options in (
        ("JSONL", "out.parquet", {}),
        ("--keep-columns", "out.jsonl", {"keep_columns": ("custom_id",)}),
        ("--output-prefix", "out.jsonl", {"prefix": "x_"}),
    ):
        with pytest.raises(BatchInferError, match=match):
            world.run(source, tmp_path / output, {}, **options)
    (tmp_path / "out.errors.jsonl").write_text("precious")
    with pytest.raises(BatchInferError, match=r"out\.errors\.jsonl exists"):
        world.run(source, tmp_path / "out.jsonl", {})
    assert world.loads == 0
    assert (tmp_path / "out.errors.jsonl").read_text() == "precious"
    assert not list(tmp_path.glob("*.partial"))


def test_row_parameters_can_be_turned_off(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [chat("a")])
    World().run(source, tmp_path / "out.jsonl", {"max_tokens": 3}, row_params=False)
    body = read_jsonl(tmp_path / "out.jsonl")[0]["response"]["body"]
    assert body["usage"]["completion_tokens"] == 3


def test_openai_line_among_plain_rows(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "plain"}, chat("a")])
    World().run(source, tmp_path / "out.jsonl")
    out = read_jsonl(tmp_path / "out.jsonl")
    assert out[1]["error"]["code"] == "wrong_shape"
    assert json.loads(json.dumps(out[1]["body"])) == chat("a")["body"]
