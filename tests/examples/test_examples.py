"""Every example runs, stays short, and the two prompt files hold the same rows."""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

from batchinfer.__main__ import run_command
from tests.oracle.tiny_models import write_tiny

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
MAX_LINES = 40


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_examples_are_short_and_tested_here(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES
    assert f'"{path.stem}"' in Path(__file__).read_text()


@pytest.mark.model
def test_generate() -> None:
    texts = load("generate").main()
    assert "Paris" in texts[0]


@pytest.mark.model
def test_chat() -> None:
    texts = load("chat").main()
    assert "Rome" in texts[0]
    assert all(texts)


@pytest.mark.model
def test_structured() -> None:
    facts, mood = load("structured").main()
    assert list(json.loads(facts)) == ["person", "place", "date"]
    assert mood in ("yes", "no")


@pytest.mark.model
def test_engine_steps() -> None:
    texts = load("engine_steps").main()
    assert sorted(texts) == [0, 1, 2]
    assert "four" in texts[0]


def test_show_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model, output = write_tiny(tmp_path / "m", "llama3.2"), tmp_path / "out.jsonl"
    code = run_command(
        ["run", str(EXAMPLES / "prompts.jsonl"), "-m", str(model), "-o", str(output), "-q", "--max-tokens", "4", "--fake-model"]
    )
    assert code == 3  # the long ones do not fit the tiny model's context
    monkeypatch.setattr(sys, "argv", ["show_answers.py", str(output), "21"])
    load("show_answers").main()
    shown = capsys.readouterr().out
    assert "[question-1] What is the capital of France?" in shown
    assert "(too_long: " in shown


def test_the_two_prompt_files_hold_the_same_rows() -> None:
    rows = [json.loads(line) for line in (EXAMPLES / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    table = [{k: v for k, v in row.items() if v is not None} for row in pq.read_table(EXAMPLES / "prompts.parquet").to_pylist()]
    assert len(rows) == 40
    assert table == rows
    assert len({row["id"] for row in rows}) == 40


@pytest.mark.model
def test_every_prompt_can_run_on_the_default_model(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("prompts.jsonl", "prompts.parquet"):
        assert run_command(["plan", str(EXAMPLES / name), "-q"]) == 0
        assert capsys.readouterr().err == "40 rows can run, 0 cannot\n"


JOBS = ("classify", "extract", "summarise", "synthesise", "judge")


@pytest.mark.model
@pytest.mark.parametrize("job", JOBS)
def test_a_ready_job_runs_on_the_default_model(job: str, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    command = ["run", str(EXAMPLES / f"{job}.jsonl"), "--config", str(EXAMPLES.parent / "configs" / f"{job}.toml")]
    assert run_command([*command, "-o", str(output), "-q", "--max-tokens", "8"]) == 0
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert rows
    assert all(row["error"] is None and row["num_generated_tokens"] for row in rows)


@pytest.mark.model
@pytest.mark.parametrize("job", ["classify", "extract", "judge"])
def test_a_ready_job_holds_its_answers_to_their_form(job: str, tmp_path: Path) -> None:
    """By its settings alone; rows with labels or fields of their own bring them."""
    command = ["run", str(EXAMPLES / f"{job}.jsonl"), "--config", str(EXAMPLES.parent / "configs" / f"{job}.toml"), "-q"]
    assert run_command([*command, "-o", str(tmp_path / "out.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) >= 2
    for row in rows:
        assert row["finish_reason"] == "stop", row
        if job == "extract":
            assert list(json.loads(row["generated_text"])) == row.get("fields", ["person", "place", "date"])
        else:
            named = ["positive", "negative", "neutral"] if job == "classify" else list("12345")
            assert row["generated_text"] in row.get("labels", named)


def test_the_schema_of_the_settings_is_that_of_the_file() -> None:
    settings = tomllib.loads((EXAMPLES.parent / "configs" / "extract.toml").read_text())
    assert json.loads(settings["response-format"]) == json.loads((EXAMPLES / "person.schema.json").read_text())
