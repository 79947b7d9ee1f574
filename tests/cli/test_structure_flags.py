"""`--response-format` and `--choices`: what cannot be used for a whole job ends it before it begins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.job.world import write_jsonl

UNUSABLE = {
    "an unknown keyword": '{"type": "object", "not": {}}',
    "a reference to nothing": '{"$ref": "#/$defs/gone"}',
    "a schema that nothing satisfies": '{"allOf": [{"type": "string"}, {"type": "number"}]}',
    "a pattern that is none": '{"type": "string", "pattern": "("}',
}


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize("schema", UNUSABLE.values(), ids=list(UNUSABLE))
def test_a_schema_that_does_not_compile_is_wrong_usage(cli: Cli, tiny_folder: Path, tmp_path: Path, command: str, schema: str) -> None:
    given = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "x"}, {"prompt": "y"}])
    (tmp_path / "s.json").write_text(schema)
    (tmp_path / "settings.toml").write_text(f"response-format = '@{tmp_path / 's.json'}'\n")
    for flags in (
        ("--response-format", schema),
        ("--response-format", f"@{tmp_path / 's.json'}"),
        ("--config", tmp_path / "settings.toml"),
    ):
        said = cli(command, given, "-m", tiny_folder, "-q", *flags)
        assert said.code == 2, said.err
        assert said.err.startswith("batchinfer: --response-format: the JSON schema "), said.err
        assert len(said.err.strip().splitlines()) == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "s.json", "settings.toml"]


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_schema_of_a_row_is_that_rows_error_still(cli: Cli, tiny_folder: Path, tmp_path: Path, command: str) -> None:
    wrong = {"type": "json_schema", "json_schema": {"schema": json.loads(UNUSABLE["an unknown keyword"])}}
    given = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "x", "max_tokens": 2}, {"prompt": "y", "response_format": wrong}])
    said = cli(command, given, "-m", tiny_folder, "--choices", "yes,no")
    assert said.code == 3, said.err
