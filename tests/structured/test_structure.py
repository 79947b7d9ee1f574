"""What rows may ask for, and how: every form gives the same structure, every mistake names the field."""

from __future__ import annotations

from typing import Any

import pytest

from batchinfer.cli.structure_flags import structure_values
from batchinfer.core.request import SamplingParams
from batchinfer.core.structure import ANY_OBJECT, MAX_BYTES, Structure, StructureKind
from batchinfer.errors import ConfigError, InputError

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
JSON = Structure(StructureKind.JSON, '{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"string"}}}')


def asked(**values: Any) -> Structure | None:
    return SamplingParams().updated(values).structured_outputs


@pytest.mark.parametrize(
    "values",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": JSON.text, "regex": None}},
        {"guided_json": SCHEMA},
        {"response_format": {"type": "text"}, "structured_outputs": {"json": SCHEMA}},
    ],
)
def test_every_way_to_ask_for_a_schema_is_the_same_structure(values: dict[str, Any]) -> None:
    assert asked(**values) == JSON


def test_the_other_kinds_and_their_aliases() -> None:
    choice = Structure(StructureKind.CHOICE, '["ja", "nein"]')
    assert asked(structured_outputs={"choice": ["ja", "nein", "ja"]}) == asked(guided_choice=["ja", "nein"]) == choice
    assert asked(structured_outputs={"regex": "a+"}) == asked(guided_regex="a+") == Structure(StructureKind.REGEX, "a+")
    assert asked(guided_grammar='start: "a"') == Structure(StructureKind.GRAMMAR, 'start: "a"')
    assert asked(response_format={"type": "json_object"}) == asked(guided_json_object=True) == ANY_OBJECT
    assert asked(response_format='{"type": "json_object"}') == ANY_OBJECT, "a table's cell may hold JSON text"
    for nothing in ({"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"guided_json_object": False}):
        assert asked(**nothing) is None


def test_text_takes_a_jobs_structure_away_from_a_row() -> None:
    job = SamplingParams().updated({"structured_outputs": {"regex": "a"}})
    assert job.structured_outputs is not None
    assert job.updated({"response_format": {"type": "text"}}).structured_outputs is None
    assert SamplingParams(structured_outputs={"regex": "a"}).check() == job  # type: ignore[arg-type]


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "values, words",
    [
        ({"response_format": [1]}, "response_format must be an object"),
        ({"response_format": {"type": "xml"}}, "response_format.type must be one of text, json_object, json_schema"),
        ({"response_format": {"type": "json_schema"}}, "json_schema must be an object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "{"}}}, "schema must be an object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": False}}}, "schema must be an object"),
        ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, "belongs under `schema`"),
        ({"response_format": "json"}, "not JSON"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "json and regex; give one"),
        ({"structured_outputs": {"json": SCHEMA}, "guided_regex": "a"}, "both say what the answer must look like"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag is not supported"),
        ({"structured_outputs": {"choice": []}}, "list of texts"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "list of texts"),
        ({"structured_outputs": {"choice": "a"}}, "list of texts"),
        ({"structured_outputs": {"regex": 5}}, "must be text"),
        ({"structured_outputs": {"regex": "\ud800"}}, "surrogate"),
        ({"structured_outputs": {"regex": "a" * (MAX_BYTES + 1)}}, "at most 262,144"),
        ({"structured_outputs": {"json": _nested(70)}}, "more than 64 levels"),
        ({"structured_outputs": {"json": _nested(30_000)}}, "more than 64 levels"),
        ({"structured_outputs": {"json": {"const": float("nan")}}}, "cannot be written as JSON"),
    ],
)
def test_what_can_never_work_is_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words.replace("`", ".")):
        asked(**values)


def test_flags_for_a_whole_job(tmp_path: Any) -> None:
    path = tmp_path / "schema.json"
    path.write_text(JSON.text)
    assert asked(**structure_values(f"@{path}", None)) == asked(**structure_values(JSON.text, None)) == JSON
    path.write_text('{"type": "json_schema", "json_schema": {"name": "x", "schema": ' + JSON.text + "}}")
    assert asked(**structure_values(f"@{path}", None)) == JSON
    assert asked(**structure_values("json_object", None)) == ANY_OBJECT
    assert asked(**structure_values(None, "good, bad")) == asked(guided_choice=["good", "bad"])
    assert asked(**structure_values(None, '["a, b", "c"]')) == asked(guided_choice=["a, b", "c"])
    for text, words in (("@nowhere.json", "cannot be read"), ("schema.json", "@FILE"), ("{", "not JSON")):
        with pytest.raises(ConfigError, match=words):
            structure_values(text, None)
    with pytest.raises(ConfigError, match="give one of them"):
        structure_values("text", "a")
    with pytest.raises(ConfigError, match="with commas between"):
        structure_values(None, " , ")
