"""The runner of cases itself, on a folder of one made-up case; and the table's own sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cases.__main__ import find_cases, main, run_try
from tests.cases.table import CASES, Try
from tests.oracle.tiny_models import write_tiny

CHECK = """
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
bad = [row for row in rows if row["error"]]
print("note: %d rows, exit %s" % (len(rows), sys.argv[sys.argv.index("--exit") + 1]))
for row in bad: print("FAIL: id %r failed" % row["id"])
sys.exit(bool(bad))
"""


@pytest.fixture
def case(tmp_path: Path) -> Path:
    folder = tmp_path / "cases" / "made-up"
    folder.mkdir(parents=True)
    (folder / "input.jsonl").write_text("".join(json.dumps({"id": i, "prompt": "x", "max_tokens": 2}) + "\n" for i in range(3)))
    (folder / "check.py").write_text(CHECK)
    write_tiny(tmp_path / "model", "llama3.2")
    return folder


def test_tries_are_judged_by_check_and_exit(case: Path, tmp_path: Path) -> None:
    model = str(tmp_path / "model")

    def judged(number: int, attempt: Try) -> tuple[bool, str]:
        verdict = run_try(case, attempt, tmp_path / f"work{number}", tmp_path)
        return verdict.passed, " ".join(verdict.notes)

    passed, notes = judged(0, Try(model=model, flags="--fake-model"))
    assert passed, notes
    assert "3 rows, exit 0" in notes
    passed, notes = judged(
        1, Try(model=model, flags="--fake-model", input="{work}/in.jsonl", setup='echo \'{"id": 7, "prompt": 1}\' > in.jsonl')
    )
    assert not passed
    assert "FAIL: id 7 failed" in notes
    passed, notes = judged(
        2,
        Try(
            model=model, flags="--fake-model", input="{work}/in.jsonl", setup='echo \'{"id": 7, "prompt": 1}\' > in.jsonl', known=("id 7",)
        ),
    )
    assert passed
    assert "waits: FAIL: id 7" in notes
    assert judged(3, Try(model=model, flags="--block-size 3", refused="must be one of"))[0]
    assert not judged(4, Try(model=model, flags="--block-size 3", refused="other words"))[0]
    assert not judged(5, Try(model=model, flags="--fake-model", refused=""))[0]


def test_without_a_folder_of_cases_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("BATCHINFER_CASES", str(tmp_path / "nowhere"))
    assert find_cases() is None
    assert main([]) == 0
    assert "skipped" in capsys.readouterr().out


def test_each_case_is_tried_or_waits() -> None:
    assert all(case.tries or case.waits for case in CASES.values())
    assert all(len({attempt.label for attempt in case.tries}) == len(case.tries) for case in CASES.values())
