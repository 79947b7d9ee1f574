"""The measurement as Markdown: a table, what was measured where, ratios, token counts, command lines and every failure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

from batchinfer.machine import Machine
from batchinfer.reports.wording import plural
from tests.peers.jobs import Figure, Job
from tests.peers.measure import Measurement

BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
UNITS = {
    Figure.FIRST_ANSWER: "s",
    Figure.TOKENS: "output tokens/s",
    Figure.VALID_ANSWERS: "valid answers/s",
    Figure.WHOLE_JOB: "whole job, s",
}


def markdown(work: Measurement, machine: Machine, when: str) -> str:
    """All that a reader needs, without folders of this machine."""
    failures: list[str] = []
    cells = [[_cell(work, index, job, failures) for job in work.jobs] for index in range(len(work.engines))]
    heads = ["engine", "weights", *(f"{job.name}, {UNITS[job.figure]}" for job in work.jobs)]
    rows = [[engine.name, engine.weights, *row] for engine, row in zip(work.engines, cells, strict=True)]
    lines = [
        f"Measured on {when}: {machine.cpu}, {plural(machine.cores, 'core')}, {machine.memory_gib:g} GiB, {machine.system}; {_rounds(work)}.",
        "",
        *(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows]),
        "",
        *(f"- {line}" for line in [*_failed(failures), *_jobs(work), *_ratios(work), *_counts(work), *_versions(work)]),
        "",
        "<details><summary>Command lines</summary>",
        "",
        "```",
        *_commands(work),
        "```",
        "",
        "</details>",
    ]
    return "\n".join(lines) + "\n"


def put_into(text: str, table: str) -> str:
    """A README with the table between its two marks, in place of what stood there. Raises `ValueError` where it lacks them."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"it lacks the lines `{BEGIN}` and `{END}`, between which the table goes")
    return f"{before}{begin}\n{table.rstrip()}\n{end}{after}"


def _rounds(work: Measurement) -> str:
    cut = ", interrupted" if work.interrupted else ""
    if work.rounds == 1:
        return f"the engines in turn, one round{cut}"
    return f"the engines in turn, medians of {work.rounds} rounds{cut}, with the least and the most in brackets"


def _cell(work: Measurement, index: int, job: Job, failures: list[str]) -> str:
    error = work.error(index, job)
    if error is not None:
        engine = work.engines[index]
        who = f"{engine.name} ({engine.weights})"
        # What ended a start ends every job: one note is enough.
        started = any(outcome.engine == index and not outcome.round and outcome.error for outcome in work.outcomes)
        note = f"{who}, {'at its first start' if started else job.name}: {error}"
        if note not in failures:
            failures.append(note)
        return f"failed [{failures.index(note) + 1}]"
    values = work.values(index, job)
    if not values:
        return "not measured"
    return number(median(values)) + (f" ({number(min(values))} to {number(max(values))})" if len(values) > 1 else "")


def number(value: float) -> str:
    """Three digits or more: 0.52, 8.13, 24.6, 1,240."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _failed(failures: list[str]) -> Iterator[str]:
    for place, note in enumerate(failures, 1):
        yield f"[{place}] {' '.join(note.replace('|', '/').replace('<', '&lt;').split())}"


def _jobs(work: Measurement) -> Iterator[str]:
    """What each job is."""
    for job in work.jobs:
        output = "answers as long as their schema lets them be" if job.output_tokens is None else f"{job.output_tokens:,} output tokens"
        yield f"*{job.name}*: {plural(job.rows, 'row')}, {job.prompt_tokens:,} prompt tokens, {output}; {job.figure.value}."


def _ratios(work: Measurement) -> Iterator[str]:
    """Ours against each peer with the same kind of weights."""
    for peer, other in enumerate(work.engines):
        for ours, engine in enumerate(work.engines):
            if other.ours or not engine.ours or engine.weights != other.weights:
                continue
            told = [(job.name, work.ratio(ours, peer, job)) for job in work.jobs]
            parts = [f"{name} {ratio:.2f}x" for name, ratio in told if ratio is not None]
            if parts:
                yield f"{engine.name} against {other.name}, both {other.weights}, median of the rounds' ratios: {', '.join(parts)}."


def _counts(work: Measurement) -> Iterator[str]:
    """Output tokens, which must be equal where lengths are fixed, and valid answers."""
    for job in work.jobs:
        told = []
        for index, engine in enumerate(work.engines):
            outcomes = [outcome for outcome in work.of(index, job) if outcome.output_tokens is not None and outcome.round]
            counts = sorted({outcome.output_tokens for outcome in outcomes if outcome.output_tokens is not None})
            valid = sorted({outcome.valid_answers for outcome in outcomes if outcome.valid_answers is not None})
            if counts:
                and_valid = f", {' or '.join(map(str, valid))} of {job.rows} answers valid" if valid else ""
                told.append((f"{engine.name} ({engine.weights})", " or ".join(f"{count:,}" for count in counts) + and_valid))
        if job.figure is Figure.FIRST_ANSWER or not told:
            continue
        if len({count for _, count in told}) == 1:
            yield f"Output tokens of {job.name}: {told[0][1]}, the same of every engine."
        else:
            yield f"Output tokens of {job.name}: {'; '.join(f'{who} {count}' for who, count in told)}."


def _versions(work: Measurement) -> Iterator[str]:
    told = {}
    for engine, versions in zip(work.engines, work.versions, strict=True):
        told[engine.name] = ", ".join(f"{name} {version}" for name, version in versions.items())
    for name, versions_of in told.items():
        yield f"Versions, {name}: {versions_of}."


def _commands(work: Measurement) -> Iterator[str]:
    """Each command once, with the jobs that it ran."""
    for engine in work.engines:
        lines: dict[str, list[str]] = {}
        for job in work.jobs:
            command = engine.command(replace(job, path=Path("/WORKLOAD.jsonl")), Path("/OUT"))
            lines.setdefault(command.short_line, []).append(job.name)
        for line, names in lines.items():
            yield f"# {engine.name}, {engine.weights}: {', '.join(names)}"
            yield line
