"""Columns that only some rows ask for: several answers, and log-probabilities, in every form of output and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import BatchInferError
from tests.job.test_openai import chat, text
from tests.job.test_openai_types import check_answer
from tests.job.world import World, read_jsonl, write_jsonl

ROWS: list[dict[str, Any]] = [
    {"prompt": "a"},
    {"prompt": "b", "n": 3},
    {"prompt": "c", "logprobs": 2, "prompt_logprobs": True},
    {"prompt": "d", "n": 2, "logprobs": 0},
    {"prompt": "e", "n": 0},
]


def test_plain_rows_carry_what_they_asked_for(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    World().run(source, tmp_path / "out.jsonl", {})
    plain, several, told, both, failed = read_jsonl(tmp_path / "out.jsonl")
    assert not {"generated_texts", "output_logprobs", "output_prompt_logprobs"} & (set(plain) | set(failed))
    assert failed["error"]["code"] == "invalid_parameter"
    assert len(several["generated_texts"]) == len(several["finish_reasons"]) == 3
    assert several["generated_text"] == several["generated_texts"][0]
    assert len(told["output_logprobs"]) == told["num_generated_tokens"]
    assert len(told["output_prompt_logprobs"]) == told["num_input_tokens"]
    assert told["output_prompt_logprobs"][0]["logprob"] is None
    assert set(told["output_logprobs"][0]) >= {"token", "token_id", "logprob", "top"}
    assert len(told["output_logprobs"][0]["top"]) == 2
    assert both["num_generated_tokens"] == sum(map(len, both["all_output_logprobs"]))
    assert both["output_logprobs"] == both["all_output_logprobs"][0]


@pytest.mark.parametrize("prefix", ["", "x_"])
def test_parquet_has_the_columns_of_any_row_with_their_types(tmp_path: Path, prefix: str) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    World().run(source, tmp_path / "out.parquet", {}, prefix=prefix)
    World().run(source, tmp_path / "out.jsonl", {}, prefix=prefix)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.schema.field(prefix + "generated_texts").type == pa.list_(pa.string())
    tokens = table.schema.field(prefix + "output_logprobs").type.value_type
    assert [field.name for field in tokens] == ["token", "token_id", "logprob", "bytes", "top"]
    for row, line in zip(table.to_pylist(), read_jsonl(tmp_path / "out.jsonl"), strict=True):
        for name in ("generated_texts", "finish_reasons", "num_generated_tokens"):
            assert row[prefix + name] == line.get(prefix + name)
        assert (row[prefix + "output_logprobs"] is None) == (prefix + "output_logprobs" not in line)
    World().run(write_jsonl(tmp_path / "few.jsonl", ROWS[:1]), tmp_path / "few.parquet", {})
    assert "generated_texts" not in pq.read_table(tmp_path / "few.parquet").column_names


def test_a_column_of_such_a_name_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(BatchInferError, match="generated_texts"):
        World().run(write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a", "generated_texts": 1}]), tmp_path / "out.jsonl", {})


def test_parameters_come_out_of_table_cells(tmp_path: Path) -> None:
    """A struct of biases has every token of all rows, null where a row does not speak of it; a map has texts or numbers."""
    biases = [{"5": 1.5, "7": None}, {"5": None, "7": -100.0}, None, {"5": None, "7": None}]
    table = pa.table({"prompt": list("abcd"), "logit_bias": biases, "n": [1, 2, None, 1], "bad_words": [["x"], None, [], ["y z"]]})
    pq.write_table(table, tmp_path / "in.parquet")
    report = World().run(tmp_path / "in.parquet", tmp_path / "out.parquet", {})
    assert report.exit_code == 0, report.first_errors
    assert [len(texts or ()) for texts in pq.read_table(tmp_path / "out.parquet")["generated_texts"].to_pylist()] == [0, 2, 0, 0]
    mapped = pa.array([[("5", 1.5)], [("7", -1.0)]], pa.map_(pa.string(), pa.float64()))
    pq.write_table(pa.table({"prompt": ["a", "b"], "logit_bias": mapped}), tmp_path / "map.parquet")
    assert World().run(tmp_path / "map.parquet", tmp_path / "map.out.parquet", {}).exit_code == 0


def test_openai_lines_have_openais_forms_and_come_back_from_them(tmp_path: Path) -> None:
    good = [
        chat("one", n=2, logprobs=True, top_logprobs=3),
        text("two", "raw", n=2, best_of=2, logprobs=2),
        chat("three", logprobs=True),
        chat("four", prompt_logprobs=1),
    ]
    source = write_jsonl(tmp_path / "in.jsonl", [*good, chat("bad", logprobs=False, top_logprobs=2), text("worse", "x", echo=True)])
    World().run(source, tmp_path / "out.jsonl", {})
    before = (tmp_path / "out.jsonl").read_bytes()
    lines = read_jsonl(tmp_path / "out.jsonl")
    assert [line["custom_id"] for line in lines] == ["one", "two", "three", "four"]
    for line in lines[:3]:
        check_answer(line)
    one, two, three, four = (line["response"]["body"] for line in lines)
    assert [choice["index"] for choice in one["choices"]] == [0, 1]
    for body in (one, two, three):
        number = sum(len(c["logprobs"].get("content") or c["logprobs"].get("tokens")) for c in body["choices"])
        assert number == body["usage"]["completion_tokens"]
    first = one["choices"][0]["logprobs"]["content"][0]
    assert len(first["top_logprobs"]) == 3
    assert bytes(first["bytes"]).decode("utf-8", "replace") == first["token"]
    assert set(two["choices"][0]["logprobs"]) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert three["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert four["choices"][0]["logprobs"] is None
    assert len(four["prompt_logprobs"]) == four["usage"]["prompt_tokens"]
    World().run(source, tmp_path / "out.jsonl", {}, retry_errors=True)
    assert (tmp_path / "out.jsonl").read_bytes() == before


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_failed_rows_run_again_beside_what_the_others_asked_for(tmp_path: Path, suffix: str) -> None:
    output = tmp_path / f"out{suffix}"
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    World().run(source, output, {})
    before = output.read_bytes()
    World().run(source, output, {}, retry_errors=True)
    assert output.read_bytes() == before
