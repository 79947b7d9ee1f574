"""`--prompt-template`: prompts from any columns; what a row lacks is its own error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.errors import ConfigError, InputError, InputFileError
from batchinfer.io.prompt_template import PromptTemplate
from tests.job.world import World, read_jsonl, write_jsonl


def prompts_of(tmp_path: Path, template: str, rows: list[Any], **options: Any) -> list[Any]:
    """What each row's prompt is (the fake model's tokens are bytes), or its error's code."""
    out = tmp_path / "out.jsonl"
    World(max_model_len=2000).run(write_jsonl(tmp_path / "in.jsonl", rows), out, {"max_tokens": 1}, prompt_template=template, **options)
    return [row["num_input_tokens"] if row["error"] is None else row["error"]["code"] for row in read_jsonl(out)]


def test_columns_become_a_prompt() -> None:
    template = PromptTemplate("{% for tag in tags %}\n{{ tag }}: {{ row['a b'] }}\n{% endfor %}\n{{ note or 'none' }} {{ tags|tojson }}")
    assert template.columns == ("note", "row", "tags")
    assert template.whole_row
    assert template.render({"tags": ["x", "ü"], "a b": 1, "note": None}) == 'x: 1\nü: 1\nnone ["x", "ü"]'


def test_rows_that_lack_a_column_are_errors(tmp_path: Path) -> None:
    rows = [{"a": "1", "b": "2"}, {"a": "1"}, {"a": None, "b": "2"}, {"a": "", "b": ""}]
    assert prompts_of(tmp_path, "{{ a }}{{ b }}", rows, chat=False) == [2, "template_error", "template_error", "empty_prompt"]
    [row] = [row for row in read_jsonl(tmp_path / "out.jsonl") if row["a"] is None]
    assert "null" in row["error"]["message"]
    assert "'b' is undefined" in read_jsonl(tmp_path / "out.jsonl")[1]["error"]["message"]


def test_the_prompt_is_one_user_message_with_the_system_prompt_before(tmp_path: Path) -> None:
    assert prompts_of(tmp_path, "{{ a }}!", [{"a": "1"}], system_prompt="s") == [len("system:s\nuser:1!\n>")]


def test_a_column_that_the_template_uses_is_no_parameter(tmp_path: Path) -> None:
    rows = [{"text": "a", "max_tokens": "many", "stop": "x"}]
    assert prompts_of(tmp_path, "{{ text }} {{ max_tokens }}", rows, chat=False) == [6]


def test_tables_bring_the_columns_that_are_used(tmp_path: Path) -> None:
    source, out = tmp_path / "in.parquet", tmp_path / "out.jsonl"
    pq.write_table(pa.table({"a": ["1", "22"], "b c": [5, 6], "unused": [1, 2]}), source)
    for template, lengths in (("{{ a }}", [1, 2]), ("{{ a }}{{ row['b c'] }}", [2, 3])):
        World().run(source, out, {"max_tokens": 1}, prompt_template=template, chat=False, overwrite=True)
        assert [row["num_input_tokens"] for row in read_jsonl(out)] == lengths
    with pytest.raises(InputFileError, match="no column 'nothing'"):
        World().run(source, tmp_path / "other.jsonl", prompt_template="{{ nothing }}")


def test_an_input_without_any_of_the_columns_is_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"x": 1}])
    with pytest.raises(InputFileError, match="no column 'text'"):
        World().run(source, tmp_path / "out.jsonl", prompt_template="{{ text }}")
    openai = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {}}
    with pytest.raises(ConfigError, match="for plain rows"):
        World().run(write_jsonl(tmp_path / "in.jsonl", [openai]), tmp_path / "out.jsonl", prompt_template="{{ text }}")


@pytest.mark.parametrize(
    ("source", "words"), [("{{ a", "syntax error in line 1"), ("no columns", "names no column"), ("{{ a }}" * 200_000, "longer")]
)
def test_templates_that_cannot_work(source: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PromptTemplate(source)


def test_the_sandbox_holds() -> None:
    for source in ("{{ a.__class__.__mro__ }}", "{% for i in range(10**9) %}{{ a }}{% endfor %}", "{{ a * 10**9 }}", "{{ a.b.c }}"):
        with pytest.raises(InputError):
            PromptTemplate(source).render({"a": "x"})


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
pieces = st.sampled_from(
    [
        *("{{ a }}", "{{ b|length }}", "{% if a %}", "{% endif %}", "{% for x in b %}", "{% endfor %}", "{{ x }}", "{{ row }}"),
        *("{{ a ~ b }}", "{{ a|tojson }}", "{{ a + b }}", "{% set a = b %}", "{{ b|join(',') }}", "{{ a % b }}", "{{ 2 ** a }}", "text"),
        *("{% macro m(v) %}", "{% endmacro %}", "{{ m(a) }}", "{{ raise_exception('no') }}", "{{ a[0] }}", "{{ row['a'] }}", "{#", "#}"),
        *("{{ a.format(b) }}", "{{ '%s' % a }}", "{{ b|sort }}", "{{ b|map('upper')|list }}", "{{ a|batch(2) }}", "{{ a|indent(a) }}"),
    ]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(pieces, max_size=8), values, values)
def test_any_template_over_any_row_is_a_prompt_or_an_error(parts: list[str], a: Any, b: Any) -> None:
    try:
        template = PromptTemplate("".join(parts))
    except ConfigError:
        return
    try:
        text = template.render({"a": a, "b": b})
    except InputError:
        return
    assert text.strip()
