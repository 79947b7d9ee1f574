"""Rows with structures in a real engine: every finished row is valid, and no switch changes a byte of any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchinfer.build import ModelHandle
from batchinfer.core.request import FinishReason, Request, Result, SamplingParams
from tests.engine.engines import build, ids, open_tiny, run_all
from tests.oracle.tiny_models import write_tiny

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["alpha", "beta", "gämma"]},
        "size": {"type": "integer", "minimum": -5, "maximum": 250},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "kind", "size", "tags"],
    "additionalProperties": False,
}
FIRST = tuple(range(300))  # all but the special tokens
ASKS: list[dict[str, Any] | None] = [
    {"json": SCHEMA},
    {"choice": ["positive", "negative", "neutral or so"]},
    {"regex": "[ab]{3,12}c"},
    None,
    {"json": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 6}},
    {"grammar": 'start: "x" ("y" | "z")~4 "end of it"'},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelHandle:
    return open_tiny(write_tiny(tmp_path_factory.mktemp("tiny"), "llama3.2"))


def rows(count: int = 18, **params: Any) -> list[Request]:
    made = []
    for i in range(count):
        noise = {"temperature": 1.3, "seed": i, "top_k": (0, 40)[i % 4 == 1]} if i % 2 else {}
        ask: Any = ASKS[i % len(ASKS)]
        made.append(
            Request(i, ids([65 + i, 3, 4, *range(i)]), SamplingParams(max_tokens=120, structured_outputs=ask, **noise | params).check())
        )
    return made


def said(results: dict[int, Result]) -> dict[int, Any]:
    return {row: (r.text, r.finish_reason, r.token_ids.tolist(), r.error) for row, r in sorted(results.items())}


@pytest.fixture(scope="module")
def reference(model: ModelHandle) -> dict[int, Any]:
    return said(run_all(build(model), rows()))


def test_every_finished_row_is_what_was_asked_for(reference: dict[int, Any]) -> None:
    from jsonschema import validate

    for row, (text, reason, _, error) in reference.items():
        ask = ASKS[row % len(ASKS)]
        assert error is None
        if ask is None or reason is not FinishReason.STOP:
            continue
        if "json" in ask:
            validate(json.loads(text), ask["json"])
        elif "choice" in ask:
            assert text in ask["choice"]
    finished = [row for row, (_, reason, *_) in reference.items() if reason is FinishReason.STOP and ASKS[row % len(ASKS)]]
    assert len(finished) == 15, "all but the rows without a structure"


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 5, "max_num_batched_tokens": 16},
        {"num_kv_blocks": 20, "block_size": 16, "optimistic": True},
        {"speculative": "ngram", "num_speculative_tokens": 4},
        {"speculative": "draft:same", "num_speculative_tokens": 3},
        {"paged": False, "max_num_seqs": 4},
        {"kv_cache": False},
        {"continuous_batching": False},
    ],
    ids=lambda options: ", ".join(f"{name} {value}" for name, value in options.items()),
)
def test_no_switch_changes_a_byte(model: ModelHandle, reference: dict[int, Any], options: dict[str, Any]) -> None:
    if options.get("speculative", "").startswith("draft"):
        options = options | {"speculative": f"draft:{model.files.path}"}
    engine = build(model, **options)
    assert said(run_all(engine, rows())) == reference
    if options.get("optimistic"):
        assert engine.stats.preemptions > 0


def test_certain_tokens_are_guessed_and_always_right(model: ModelHandle) -> None:
    engine = build(model)
    run_all(engine, rows())
    assert engine.stats.proposed_tokens > 100
    assert engine.stats.accepted_tokens == engine.stats.proposed_tokens


def test_rows_without_structure_are_what_they_are_alone(model: ModelHandle, reference: dict[int, Any]) -> None:
    free = [row for row in rows() if row.params.structured_outputs is None]
    assert said(run_all(build(model), free)) == {row.row: reference[row.row] for row in free}


def one(model: ModelHandle, **params: Any) -> Result:
    return run_all(build(model), [Request(0, ids([70, 71]), SamplingParams(**params).check())])[0]


def test_a_complete_answer_ends_the_row_whatever_else_is_asked(model: ModelHandle) -> None:
    choice: Any = {"choice": ["yes", "no"]}
    for params in ({}, {"min_tokens": 30}, {"ignore_eos": True}):
        result = one(model, max_tokens=40, structured_outputs=choice, **params)
        assert result.finish_reason is FinishReason.STOP
        assert result.text in ("yes", "no")


def test_an_end_comes_only_where_the_structure_allows_it(model: ModelHandle) -> None:
    number: Any = {"json": {"type": "integer", "minimum": 100, "maximum": 99999}}
    for seed in range(12):
        result = one(model, max_tokens=12, temperature=1.5, seed=seed, structured_outputs=number)
        assert result.finish_reason is FinishReason.STOP
        assert 100 <= int(result.text) <= 99999
        assert result.text == str(int(result.text))
    longer = one(model, max_tokens=12, min_tokens=5, structured_outputs=number)
    assert len(longer.text) == 5


def test_a_cut_row_says_so_and_a_stop_string_inside_is_an_error(model: ModelHandle) -> None:
    cut = one(model, max_tokens=3, structured_outputs={"json": SCHEMA})
    assert (cut.finish_reason, cut.error) == (FinishReason.LENGTH, None)
    stopped = one(model, max_tokens=80, structured_outputs={"json": SCHEMA}, stop=['"kind"'])
    assert stopped.error is not None
    assert stopped.error.code == "structured_output_invalid"
    unharmed = one(model, max_tokens=80, structured_outputs={"json": SCHEMA}, stop=["\n\n"])
    assert unharmed.error is None


def test_a_bad_schema_is_its_rows_error_and_the_others_run(model: ModelHandle) -> None:
    bad: Any = {"json": {"not": {}}}
    engine = build(model)
    asked = [Request(i, ids([70, i]), SamplingParams(max_tokens=6, structured_outputs=bad if i == 2 else None).check()) for i in range(5)]
    results = {result.row: result for result in engine.run(asked)}
    assert results[2].error is not None
    assert results[2].error.code == "unsupported_schema"
    assert all(results[i].error is None for i in (0, 1, 3, 4))


def test_what_bans_and_structure_leave_nothing_for_is_the_rows_error(model: ModelHandle) -> None:
    result = one(model, max_tokens=9, min_tokens=9, stop_token_ids=FIRST, structured_outputs={"choice": ["ab", "cd"]})
    assert result.error is not None
    assert result.error.code == "structured_output_impossible"


def test_every_one_of_several_choices_is_valid(model: ModelHandle) -> None:
    result = one(model, max_tokens=120, n=3, temperature=1.2, structured_outputs={"json": SCHEMA})
    assert result.error is None
    assert len(result.choices) == 3
    for choice in result.choices:
        assert set(json.loads(choice.text)) == set(SCHEMA["required"])


def test_a_fake_model_obeys_structures(tmp_path: Path) -> None:
    handle = open_tiny(write_tiny(tmp_path / "m", "llama3.2"))
    assert {run_all(build(handle, fake_model=True), rows(12))[i].error for i in range(12)} == {None}
