"""`make cases`: run a folder of cases and print a table. `python -m tests.cases [NAME ...]` runs some.

A case is a folder `NAME/` with the inputs of a trouble that was seen in some tool, `expect.md` (what must happen, in
words) and `check.py OUTPUT [VARIANT] --exit CODE --stderr FILE --wall SECONDS`, which judges a run and prints lines that
begin with FAIL or note. Where a case needs models of its own, `make.py FOLDER` writes them. `_lib/` beside the cases
holds what several of them share. BATCHINFER_CASES names the folder of cases; `table.py` says how each is tried.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.cases.table import CASES, Case, Try

ROOT = Path(__file__).resolve().parents[2]
TIMED_OUT = 124
TRACEBACK = "Traceback (most recent call last)"


@dataclass
class Verdict:
    """What became of one try."""

    case: str
    label: str
    passed: bool
    seconds: float
    notes: list[str] = field(default_factory=list)


def find_cases() -> Path | None:
    """The folder of cases that BATCHINFER_CASES names, if it is there."""
    given = os.environ.get("BATCHINFER_CASES")
    return Path(given).resolve() if given and Path(given).is_dir() else None


@cache
def default_model() -> Path:
    """The default model's file, which the table calls {gguf}; fetched when it is not there yet."""
    from batchinfer.weights.source import resolve_model

    return resolve_model("smollm2-135m").path


def main(names: list[str]) -> int:
    cases = find_cases()
    if cases is None:
        print("skipped: set BATCHINFER_CASES to a folder of cases (tests/cases/__main__.py says what one looks like)")
        return 0
    chosen = {name: case for name, case in CASES.items() if not names or any(name.startswith(wanted) for wanted in names)}
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="batchinfer-cases-") as scratch:
        for name, case in chosen.items():
            for verdict in run_case(cases / name, case, Path(scratch) / name):
                verdicts.append(verdict)
                print_verdict(verdict)
    unknown = sorted(path.name for path in cases.iterdir() if path.name not in CASES and (path / "expect.md").exists())
    print_end(chosen, verdicts, unknown)
    return 1 if unknown or not all(verdict.passed for verdict in verdicts) else 0


def run_case(folder: Path, case: Case, scratch: Path) -> Iterator[Verdict]:
    """Try after try, so that the table grows as they end."""
    models = scratch / "models"
    if any("{models}" in attempt.model for attempt in case.tries):
        made = subprocess.run([sys.executable, str(folder / "make.py"), str(models)], capture_output=True, text=True, check=False)
        if made.returncode:
            yield Verdict(folder.name, "make.py", False, 0.0, made.stderr.strip().splitlines()[-1:])
            return
    for number, attempt in enumerate(case.tries):
        yield run_try(folder, attempt, scratch / str(number), models)


def run_try(folder: Path, attempt: Try, work: Path, models: Path) -> Verdict:
    work.mkdir(parents=True)
    start = f"{sys.executable} -m batchinfer run"
    places = {
        "case": str(folder),
        "cases": str(folder.parent),
        "work": str(work),
        "models": str(models),
        "run": start,
        "gguf": str(default_model()),
    }
    output = Path(fill(attempt.output, places))
    if attempt.setup:
        subprocess.run(["bash", "-c", fill(attempt.setup, places)], cwd=work, env=environment(), check=False)
    if attempt.sentinel:
        output.write_text("SENTINEL")
    started = time.monotonic()
    code, stderr = execute(attempt, fill(attempt.shell, places), command_of(attempt, places, output), work)
    seconds = time.monotonic() - started
    (work / "stderr").write_text(stderr)
    label = fill(attempt.label, {"work": ".", "case": "", "models": ""}) or attempt.variant or "as it comes"
    verdict = Verdict(folder.name, label, True, seconds)
    judge(verdict, attempt, folder, output, code, work)
    return verdict


def command_of(attempt: Try, places: dict[str, str], output: Path) -> list[str]:
    command = [sys.executable, "-m", "batchinfer", "run", fill(attempt.input, places), "-m", fill(attempt.model, places)]
    if attempt.no_chat:
        command.append("--no-chat")
    flags = shlex.split(attempt.flags)
    return [*command, *flags] if "-o" in flags else [*command, "-o", str(output), *flags]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def execute(attempt: Try, shell: str, command: list[str], work: Path) -> tuple[int, str]:
    """Exit code and stderr of a command that is started through the shell line of its try."""
    shell = shell.replace("env -i ", f"env -i PYTHONPATH={shlex.quote(str(ROOT))} ")
    line = ["bash", "-c", shell, "bash", *command]
    try:
        ended = subprocess.run(line, cwd=work, env=environment(), capture_output=True, timeout=attempt.timeout, check=False)
    except subprocess.TimeoutExpired as error:
        return TIMED_OUT, (error.stderr or b"").decode(errors="replace") + f"\nstopped after {attempt.timeout} s"
    (work / "stdout").write_bytes(ended.stdout)
    return ended.returncode, ended.stderr.decode(errors="replace")


def judge(verdict: Verdict, attempt: Try, folder: Path, output: Path, code: int, work: Path) -> None:
    stderr = (work / "stderr").read_text()
    if TRACEBACK in stderr:
        verdict.passed = False
        verdict.notes.append("a traceback on stderr: " + stderr.strip().splitlines()[-1])
    if attempt.refused is not None:
        judge_refusal(verdict, attempt.refused, code, stderr)
        return
    if attempt.driven:
        verdict.passed &= code == 0
        verdict.notes += [line for line in (work / "stdout").read_text(errors="replace").splitlines() if line.startswith("FAIL")]
        return
    check = [sys.executable, str(folder / "check.py"), str(output)]
    check += [attempt.variant] if attempt.variant else []
    check += ["--exit", str(code), "--stderr", str(work / "stderr"), "--wall", f"{verdict.seconds:.1f}"]
    given = {key: fill(value, {"work": str(work)}) for key, value in attempt.env}
    checked = subprocess.run(check, capture_output=True, text=True, env={**os.environ, **given}, check=False)
    lines = [line for line in checked.stdout.splitlines() if line.startswith(("FAIL", "note"))]
    waiting = [line for line in lines if line.startswith("FAIL") and any(word in line for word in attempt.known)]
    lines = [line for line in lines if line not in waiting] + ["waits: " + line for line in waiting]
    if checked.returncode and not (waiting and not any(line.startswith("FAIL") for line in lines)):
        verdict.passed = False
        lines += checked.stderr.strip().splitlines()[-1:]
        if code not in (0, 3):
            lines += [f"exit {code}: " + " ".join(stderr.strip().splitlines()[-1:])]
    verdict.notes += lines


def judge_refusal(verdict: Verdict, word: str, code: int, stderr: str) -> None:
    """A refusal is a non-zero exit by the program's own will, and one line that says what was wrong."""
    said = stderr.strip().splitlines()[-1:] or ["nothing"]
    if code == 0 or code >= 124 or code < 0:
        verdict.passed = False
        verdict.notes.append(f"must be refused, exit {code}")
    if not re.search(re.escape(word), stderr, re.IGNORECASE):
        verdict.passed = False
        verdict.notes.append(f"the message must hold {word!r}")
    verdict.notes.append("refused: " + said[0])


def fill(text: str, places: dict[str, str]) -> str:
    for name, value in places.items():
        text = text.replace("{" + name + "}", value)
    return text


def print_verdict(verdict: Verdict) -> None:
    first, *rest = [note[:200] for note in verdict.notes] or [""]
    print(f"{'pass' if verdict.passed else 'FAIL'}  {verdict.case:<34}{verdict.label:<36}{verdict.seconds:6.1f} s  {first}", flush=True)
    if not verdict.passed:
        for note in rest:
            print(" " * 12 + note, flush=True)


def print_end(chosen: dict[str, Case], verdicts: list[Verdict], unknown: list[str]) -> None:
    failed = sorted({verdict.case for verdict in verdicts if not verdict.passed})
    tried = {verdict.case for verdict in verdicts}
    passed = sum(verdict.passed for verdict in verdicts)
    print(f"\n{len(tried)} cases tried, {len(tried) - len(failed)} passed; {passed} of {len(verdicts)} tries passed")
    if failed:
        print("failed: " + ", ".join(failed))
    waiting = {name: case.waits for name, case in chosen.items() if case.waits}
    if waiting:
        print("waiting for a later version, whole or in part:")
        for name, what in waiting.items():
            print(f"  {name:<34}{what}{' (the rest was tried)' if name in tried else ''}")
    if unknown:
        print("in the folder but not in the table: " + ", ".join(unknown))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
