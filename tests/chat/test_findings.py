"""What a plan warns of before anything runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchinfer.__main__ import run_command
from batchinfer.core.request import Request, SamplingParams
from batchinfer.io.chat_template import ChatTemplate
from batchinfer.io.options import InputOptions
from batchinfer.io.tokenizer import Tokenizer, load_tokenizer
from batchinfer.reports.findings import PlanChecks, bos_ids, template_findings, template_marks
from batchinfer.weights.source import resolve_model
from tests.job.world import write_jsonl
from tests.oracle.tiny_models import write_tiny
from tests.tokenizer.test_chat_template import CHATML, LLAMA2, LLAMA3_TOOLS, SPECIAL

NO_ROLES = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("m"), "llama3.2")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(resolve_model(str(folder)))


def codes(tokenizer: Tokenizer, template: str, roles: list[str], tools: bool = False) -> list[str]:
    changed = replace(tokenizer, template=ChatTemplate(template, "here", SPECIAL))
    return [finding.code for finding in template_findings(changed, roles, tools)]


def test_templates_that_surprise_are_found_by_trying_them(tokenizer: Tokenizer) -> None:
    assert codes(tokenizer, CHATML, ["system", "user", "assistant"]) == []
    assert codes(tokenizer, CHATML, ["user"], tools=True) == ["tools_dropped"]
    assert codes(tokenizer, LLAMA2, ["system", "assistant"]) == ["no_generation_prompt"]
    assert codes(tokenizer, NO_ROLES, ["system", "user", "tool"]) == ["no_generation_prompt", "role_dropped", "role_dropped"]
    nosys = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    assert codes(tokenizer, nosys, ["system"]) == ["role_refused"]
    assert "tools_dropped" not in codes(tokenizer, LLAMA3_TOOLS, [], tools=True)


def test_marks_and_bos(tokenizer: Tokenizer) -> None:
    marks = template_marks(tokenizer)
    assert marks is None or not marks.search("an ordinary prompt <b>")
    assert all(index in tokenizer.vocabulary.special_ids for index in bos_ids(tokenizer))


def planned(folder: Path, tmp_path: Path, rows: list[Any], *flags: str) -> tuple[int, dict[str, Any]]:
    source, report = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "plan.json"
    code = run_command(["plan", str(source), "-m", str(folder), "--fake-model", "-q", "--json", str(report), *flags])
    return code, json.loads(report.read_text())


def test_a_plan_names_rows(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"id": 1, "prompt": "the same"}, {"id": 2, "prompt": "the same"}, {"id": 1, "prompt": "x" * 3000}, {"id": 4, "prompt": 5}]
    code, plan = planned(folder, tmp_path, rows, "--no-chat", "--on-too-long", "truncate-left")
    found = {finding["code"]: finding for finding in plan["findings"]}
    assert code == 3
    assert found["identical_prompts"]["first_rows"] == [1]
    assert found["truncated"]["first_rows"] == [2]
    assert plan["duplicate_ids"]["count"] == 1
    assert list(plan["errors"]) == ["invalid_prompt"]
    code, plan = planned(folder, tmp_path, rows[:3], "--no-chat", "--on-too-long", "skip")
    assert (code, plan["rows"]["failed"], plan["errors"]["skipped"]["count"]) == (0, 0, 1)


def test_two_bos_tokens_are_named(tokenizer: Tokenizer) -> None:
    bos = min(tokenizer.vocabulary.special_ids)
    named = {"bos_token": tokenizer.vocabulary.decode([bos], skip_special_tokens=False)}
    checks = PlanChecks(replace(tokenizer, template=ChatTemplate(CHATML, "here", named)), InputOptions(input="x"), chat=False)
    items = [Request(row, np.array(ids, np.int32), SamplingParams()) for row, ids in enumerate([[bos, bos, 5], [bos, 5], [5, 5]])]
    assert list(checks.watch(items, lambda row: False)) == items
    assert [(finding.code, finding.rows) for finding in checks.findings()] == [("double_bos", (0,))]
