"""Runs commands in turn, each for its time at most, and keeps what came of every one: figures, or the reason why there are none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import jsonschema

from tests.peers.engines import Command, Engine
from tests.peers.jobs import Figure, Job


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that has ended. `documents`: the JSON objects of its stdout, a line each, and when they came, in seconds."""

    code: int
    wall_s: float
    timed_out: bool
    documents: list[tuple[float, dict[str, Any]]]
    last_line: str  # of stderr, or of stdout where stderr is empty


@dataclass(slots=True)
class Outcome:
    """One engine on one job in one round. Times in seconds; `value` is the job's figure; None is what could not be had."""

    engine: int  # its place in the list of engines
    job: str
    round: int  # 0: the untimed first start
    command: str
    wall_s: float
    value: float | None = None
    first_answer_s: float | None = None
    generating_s: float | None = None
    load_s: float | None = None
    output_tokens: int | None = None
    failed_rows: int = 0
    valid_answers: int | None = None
    error: str | None = None


@dataclass(slots=True)
class Measurement:
    """All outcomes so far."""

    engines: Sequence[Engine]
    jobs: Sequence[Job]
    rounds: int
    versions: list[dict[str, str]]
    outcomes: list[Outcome] = field(default_factory=list)
    interrupted: bool = False

    def of(self, engine: int, job: Job) -> list[Outcome]:
        """The timed outcomes of an engine on a job; an untimed start that failed stands for all of them."""
        mine = [outcome for outcome in self.outcomes if outcome.engine == engine]
        return [o for o in mine if o.round and o.job == job.name] or [o for o in mine if not o.round and o.error]

    def error(self, engine: int, job: Job) -> str | None:
        """Why there is no figure of an engine on a job. One failed round is enough: it is shown, not left out of a median."""
        return next((outcome.error for outcome in self.of(engine, job) if outcome.error), None)

    def values(self, engine: int, job: Job) -> list[float]:
        """The figures of all rounds."""
        return [outcome.value for outcome in self.of(engine, job) if outcome.value is not None]

    def ratio(self, ours: int, peer: int, job: Job) -> float | None:
        """How many times faster ours is: the median of what each round says, since a machine's speed moves between rounds."""
        if self.error(ours, job) or self.error(peer, job):
            return None
        pairs = list(zip(self.values(ours, job), self.values(peer, job), strict=False))
        larger_is_better = job.figure in (Figure.TOKENS, Figure.VALID_ANSWERS)
        ratios = [(a / b if larger_is_better else b / a) for a, b in pairs if a and b]
        return median(ratios) if ratios else None

    def as_dict(self) -> dict[str, Any]:
        """For a JSON report."""
        return {
            "rounds": self.rounds,
            "interrupted": self.interrupted,
            "engines": [
                {"name": engine.name, "weights": engine.weights, "versions": versions}
                for engine, versions in zip(self.engines, self.versions, strict=True)
            ],
            "jobs": [{**asdict(job), "figure": job.figure.value, "path": str(job.path)} for job in self.jobs],
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
        }


def measure(work: Measurement, first: Job, folder: Path, timeout_s: float, tell: Callable[[Outcome], None]) -> None:
    """Start every engine once untimed with the job `first`, so that it builds and caches what it keeps; then all jobs, engines in turn.

    What has failed once is not tried again. Ctrl-C ends the measuring and keeps what there is.
    """
    try:
        for index in range(len(work.engines)):
            _one(work, index, first, 0, folder, timeout_s, tell)
        for round_number in range(1, work.rounds + 1):
            for job in work.jobs:
                for index in range(len(work.engines)):
                    if work.error(index, job) is None:
                        _one(work, index, job, round_number, folder, timeout_s, tell)
    except KeyboardInterrupt:
        work.interrupted = True


def _one(
    work: Measurement, index: int, job: Job, round_number: int, folder: Path, timeout_s: float, tell: Callable[[Outcome], None]
) -> None:
    engine = work.engines[index]
    files = folder / f"{job.name}-{index}-{engine.name.split()[0].lower()}-{engine.weights}-{round_number}"
    outcome = run_engine(engine, job, files, timeout_s)
    outcome.engine, outcome.round = index, round_number
    work.outcomes.append(outcome)
    tell(outcome)


def run_engine(engine: Engine, job: Job, files: Path, timeout_s: float) -> Outcome:
    """One run. Its stdout and stderr are kept in files beside its answers."""
    command = engine.command(job, files)
    for old in (command.report, command.answers):
        if old is not None:
            old.unlink(missing_ok=True)  # a run that fails must not be judged by the files of another
    outcome = Outcome(0, job.name, 0, command.line, 0.0)
    try:
        ended = execute(command, files, timeout_s)
    except OSError as error:  # no such program
        outcome.error = str(error)
        return outcome
    outcome.wall_s = ended.wall_s
    try:
        _read_figures(outcome, command, job, ended)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        outcome.error = f"its figures cannot be read ({type(error).__name__}: {error})"
    if ended.timed_out:
        outcome.error = f"stopped after {timeout_s:g} s; its last line: {ended.last_line}"
    elif outcome.error and ended.code:
        outcome.error = f"exit code {ended.code}: {ended.last_line}"
    if outcome.error:
        outcome.value = None
    return outcome


def execute(command: Command, files: Path, timeout_s: float) -> Ended:
    """Run a command in a process group of its own, which ends with it: engines start processes that may outlive them."""
    log, documents, last = files.with_suffix(".stderr"), [], ""
    with log.open("wb") as stderr:
        started = time.perf_counter()
        process = subprocess.Popen(
            command.argv, env=command.environment, cwd=files.parent, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
        )

        def listen() -> None:
            nonlocal last
            assert process.stdout is not None
            with files.with_suffix(".stdout").open("wb") as kept:
                for line in process.stdout:
                    since = time.perf_counter() - started
                    kept.write(line)
                    last = line.decode(errors="replace").strip() or last
                    if line.startswith(b"{"):
                        with suppress(ValueError):
                            documents.append((since, json.loads(line)))

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        timed_out = False
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            wall_s = time.perf_counter() - started
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        listener.join(10)
    said = log.read_text(encoding="utf-8", errors="replace").split("\n")
    last_said = next((line.strip() for line in reversed(said) if line.strip()), last)
    return Ended(code, wall_s, timed_out, documents, last_said)


def _read_figures(outcome: Outcome, command: Command, job: Job, ended: Ended) -> None:
    """Fill an outcome in from what a command wrote. Raises what a missing or misshapen document raises."""
    if ended.documents:
        outcome.first_answer_s = ended.documents[0][0]
    if command.report is not None:
        _read_report(outcome, json.loads(command.report.read_text(encoding="utf-8")))
    else:
        _read_line(outcome, ended.documents[-1][1])
    if job.output_tokens is not None and outcome.output_tokens is not None and outcome.output_tokens != job.output_tokens:
        outcome.error = f"generated {outcome.output_tokens:,} tokens where the rows ask for {job.output_tokens:,}"
    if outcome.failed_rows and job.figure is not Figure.VALID_ANSWERS:
        outcome.error = f"{outcome.failed_rows:,} of {job.rows:,} rows failed"
    if job.figure is Figure.VALID_ANSWERS and command.answers is not None:
        outcome.valid_answers = count_valid(command.answers, job.schemas())
    outcome.value = _value(outcome, job)


def _read_report(outcome: Outcome, report: dict[str, Any]) -> None:
    """batchinfer's report; `run` is the time from the first admitted row to the last finished one."""
    outcome.generating_s = report["seconds"]["run"]
    outcome.output_tokens = report["tokens"]["output"]
    outcome.failed_rows = report["rows"]["failed"]
    outcome.load_s = report["seconds"]["load"]


def _read_line(outcome: Outcome, line: dict[str, Any]) -> None:
    """A peer's line, or an answer of batchinfer on stdout."""
    outcome.generating_s, outcome.load_s = line.get("seconds"), line.get("load_s")
    outcome.output_tokens = line.get("output_tokens", line.get("num_generated_tokens"))
    outcome.failed_rows = int(line.get("error") is not None)


def _value(outcome: Outcome, job: Job) -> float | None:
    if job.figure is Figure.FIRST_ANSWER:
        return outcome.first_answer_s
    if job.figure is Figure.WHOLE_JOB:
        return outcome.wall_s
    assert outcome.generating_s is not None
    count = outcome.valid_answers if job.figure is Figure.VALID_ANSWERS else outcome.output_tokens
    return None if count is None else count / outcome.generating_s


def count_valid(answers: Path, schemas: Sequence[dict[str, Any]]) -> int:
    """How many answers are JSON that fits the schema of their row."""
    texts = [json.loads(line)["generated_text"] for line in answers.read_text(encoding="utf-8").split("\n") if line]
    if len(texts) != len(schemas):
        raise ValueError(f"{len(texts)} answers to {len(schemas)} rows")
    return sum(_fits(text, schema) for text, schema in zip(texts, schemas, strict=True))


def _fits(text: str | None, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text or ""), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
