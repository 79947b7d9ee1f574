"""Measures batchinfer beside its peers, each in its own environment, and writes the README's table.

    python -m tests.peers --out FOLDER --workload chats.jsonl --workload prefix.jsonl \\
        --openvino ov/bin/python OV_INT8 --vllm vl/bin/python MODEL --rounds 3 --readme README.md

The jobs: `start-up` (one short question), every workload file under its own name, `json-schema` (256 texts to be
answered as records of six schemas) and `short-answers` (1,000 rows of 4 to 16 output tokens). Rows of a workload file
are JSON objects with `prompt_token_ids`, `max_tokens`, `ignore_eos` and `temperature`, so that every engine gets the
same work. A folder for OpenVINO is what `optimum-cli export openvino --weight-format int8` wrote of the model that vLLM
gets; batchinfer runs `--model`. Nothing else should run on the machine meanwhile.

Every engine starts once untimed, then the engines take turns, job by job and round by round. An engine that fails, takes
longer than `--timeout` or generates another number of tokens than the rows ask for is shown as failed, with the reason.
FOLDER gets the jobs' rows, what each run printed and answered, `report.json` (rewritten after every run) and `table.md`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from batchinfer.errors import BatchInferError
from batchinfer.machine import Machine, read_machine
from tests.peers.engines import Engine, batchinfer_engines, openvino_engine, vllm_engine
from tests.peers.jobs import START, Job, WrongRows, make_jobs
from tests.peers.measure import Measurement, Outcome, measure
from tests.peers.table import markdown, number, put_into

ALL_FINE, WRONG_USAGE, SOME_FAILED, INTERRUPTED = 0, 2, 3, 130


def main(arguments: Sequence[str]) -> int:
    given = parser().parse_args(arguments)
    folder = given.out.absolute()
    try:
        if given.readme is not None:
            put_into(given.readme.read_text(encoding="utf-8"), "")  # what would fail at the end fails now
        folder.mkdir(parents=True, exist_ok=True)
        jobs = make_jobs(folder, given.workload, given.model, given.rows, given.seed)
        chosen = choose(jobs, given.jobs)
    except (OSError, ValueError, WrongRows, BatchInferError) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USAGE
    engines = engines_of(given)
    work = Measurement(engines, chosen, given.rounds, [engine.versions() for engine in engines])
    machine, when = read_machine(), f"{datetime.now():%Y-%m-%d}"
    first = next(job for job in jobs if job.name == START)
    write_report(folder, work, machine, when)
    measure(work, first, folder, given.timeout, teller(folder, work, machine, when))
    write_report(folder, work, machine, when)
    table = markdown(work, machine, when)
    (folder / "table.md").write_text(table, encoding="utf-8")
    print(table)
    if given.readme is not None and not work.interrupted:
        given.readme.write_text(put_into(given.readme.read_text(encoding="utf-8"), table), encoding="utf-8")
    if work.interrupted:
        return INTERRUPTED
    return SOME_FAILED if any(outcome.error for outcome in work.outcomes) else ALL_FINE


def parser() -> argparse.ArgumentParser:
    given = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where everything is written")
    given.add_argument("--workload", type=Path, action="append", default=[], metavar="FILE", help="rows to measure with; may be repeated")
    given.add_argument("--openvino", type=Path, nargs=2, metavar=("PYTHON", "MODEL"), help="OpenVINO GenAI's Python and its model folder")
    given.add_argument("--vllm", type=Path, nargs=2, metavar=("PYTHON", "MODEL"), help="vLLM's Python and its model folder")
    given.add_argument("--model", default="smollm2-135m", help="what batchinfer runs (smollm2-135m)")
    given.add_argument("--concurrency", type=positive, default=256, metavar="N", help="most rows at once, of every engine (256)")
    given.add_argument("--rounds", type=positive, default=3, metavar="N", help="measured runs of every engine on every job (3)")
    given.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="after which a run is stopped (600)")
    given.add_argument("--jobs", type=lambda text: text.split(","), metavar="NAME,...", help="only these jobs")
    given.add_argument("--rows", type=positive, metavar="N", help="at most so many rows of every job, for a trial")
    given.add_argument("--seed", type=int, default=0, help="of the rows that are made here (0)")
    given.add_argument("--readme", type=Path, metavar="FILE", help="a file between whose two marks the table is put")
    return given


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def choose(jobs: Sequence[Job], names: Sequence[str] | None) -> list[Job]:
    """The jobs of those names, or all. Raises `ValueError` for a name that none has."""
    known = {job.name: job for job in jobs}
    unknown = [name for name in names or [] if name not in known]
    if unknown:
        raise ValueError(f"--jobs {unknown[0]}: there are {', '.join(known)}")
    return [known[name] for name in known if names is None or name in names]


def engines_of(given: argparse.Namespace) -> list[Engine]:
    # Commands run in another folder, so every path is made whole; a link stays one, since it says which environment is meant.
    model = str(Path(given.model).absolute()) if Path(given.model).exists() else given.model
    engines = batchinfer_engines(model, given.concurrency)
    for make, place in ((openvino_engine, given.openvino), (vllm_engine, given.vllm)):
        if place is not None:
            python, folder = place
            engines.append(make(python.absolute(), folder.absolute(), given.concurrency))
    return engines


def teller(folder: Path, work: Measurement, machine: Machine, when: str) -> Callable[[Outcome], None]:
    """Says on stderr what came of a run, and keeps it."""

    def tell(outcome: Outcome) -> None:
        engine = work.engines[outcome.engine]
        what = "untimed first start" if not outcome.round else f"round {outcome.round}, {outcome.job}"
        told = f"failed: {outcome.error}" if outcome.error else number(outcome.value) if outcome.value is not None else "no figure"
        print(f"[{outcome.wall_s:6.1f} s] {engine.name} {engine.weights}, {what}: {told}", file=sys.stderr, flush=True)
        write_report(folder, work, machine, when)

    return tell


def write_report(folder: Path, work: Measurement, machine: Machine, when: str) -> None:
    document = {"when": when, "command": sys.argv, "machine": asdict(machine), **work.as_dict()}
    (folder / "report.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the engine that runs is ended too
    sys.exit(main(sys.argv[1:]))
