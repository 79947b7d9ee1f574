"""Throughput and step times of one configuration on one workload."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from signal import SIGINT
from typing import TYPE_CHECKING, Any

import numpy as np

from batchinfer.core.request import Result
from batchinfer.errors import InputError
from batchinfer.job import JobReport
from batchinfer.job.progress import Tally
from batchinfer.machine import peak_rss_mb
from batchinfer.reports.intervals import Spread
from batchinfer.reports.latency import LatencyLog
from batchinfer.reports.summary import RunSummary, output_rate
from batchinfer.reports.workload import Workload

if TYPE_CHECKING:
    from batchinfer.core.stats import StepShape
    from batchinfer.engine import Engine

Tick = Callable[["Engine", int, float], None]  # the engine, rows done, seconds since the run began


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One measured run: the job's report, how long rows waited, and what they said."""

    report: JobReport
    latency: LatencyLog
    outputs: dict[int, np.ndarray] = field(default_factory=dict)  # token ids by row, int32; rows that failed are not in it

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens a second of the run."""
        return output_rate(self.report)

    def extra_keys(self) -> dict[str, Any]:
        """What `bench --json` holds beside the keys of every report."""
        ttft, itl = self.latency.ttft, self.latency.itl
        return {
            "ttft_ms": ttft.as_dict() if ttft is not None else None,
            "itl_ms": itl.as_dict() if itl is not None else None,
            "peak_blocks": self.report.stats.peak_blocks_used,
            "peak_running": self.report.stats.peak_running,
        }


@dataclass(slots=True)
class Repeats:
    """Several runs of the same work: the one of median throughput stands for them, and their spread beside it."""

    runs: list[tuple[BenchRun, RunSummary]] = field(default_factory=list)

    def add(self, run: BenchRun, summary: RunSummary) -> None:
        """Keep a run. One that was interrupted counts only when it is the first."""
        if not self.runs or not run.report.interrupted:
            self.runs.append((run, summary))

    @property
    def median(self) -> tuple[BenchRun, RunSummary]:
        """The run of median throughput; of two, the slower one."""
        ordered = sorted(self.runs, key=lambda pair: pair[0].output_tokens_per_s)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def exit_code(self) -> int:
        """The worst of all runs."""
        return max(run.report.exit_code for run, _ in self.runs)

    def lines(self) -> list[str]:
        """For people: latencies, and with several runs their spread."""
        latency = self.median[0].latency
        named = (("time to first token (from admission)", latency.ttft), ("inter-token latency", latency.itl))
        lines = [f"{name}: {waits.in_words()}" for name, waits in named if waits is not None]
        if len(self.runs) > 1:
            spread = Spread.of([run.output_tokens_per_s for run, _ in self.runs])
            lines.append(
                f"output tokens/s of {spread.runs} runs: median {spread.median:,.1f}, from {spread.low:,.1f} to {spread.high:,.1f}; "
                "the report above is of the median run"
            )
        return lines

    def as_dict(self) -> dict[str, Any]:
        """For a JSON report: every run in short, and their spread."""
        rates = [run.output_tokens_per_s for run, _ in self.runs]
        return {
            "repeats": [
                {
                    "output_tokens_per_s": round(run.output_tokens_per_s, 2),
                    "seconds": round(run.report.seconds.run, 4),
                    "limit_fraction": None if summary.limit is None else round(summary.limit.fraction, 4),
                    **run.extra_keys(),
                }
                for run, summary in self.runs
            ],
            "output_tokens_per_s_spread": Spread.of(rates).as_dict(),
            "interrupted": any(run.report.interrupted for run, _ in self.runs),
        }


def run_workload(engine: Engine, workload: Workload, tick: Tick | None = None) -> BenchRun:
    """Run every request of a workload and report on it; `tick(engine, rows done, seconds)` is called after each step.

    Ctrl-C ends the run early: the report then holds what was measured until then, and says so.
    """
    log, outputs = LatencyLog(), {}
    also = engine.on_step
    engine.on_step = _both(log, also)
    report = JobReport(input=workload.name, output="", model=str(engine.settings.get("model", "")), rows_total=len(workload.requests))
    tally, began = Tally(), time.perf_counter()
    try:
        for result in _results(engine, workload, tally, tick, began):
            tally.add(result)
            if result.error is None:
                outputs[result.row] = result.token_ids
    except KeyboardInterrupt:
        report.interrupted = SIGINT
        report.message = (
            f"stopped by SIGINT after {tally.rows_done:,} of {report.rows_total:,} rows: the numbers are those of the part that ran"
        )
    report.seconds.run = time.perf_counter() - began
    engine.on_step = also
    _take_totals(report, tally, engine)
    return BenchRun(report, log, outputs)


@dataclass(frozen=True, slots=True)
class Before:
    """Seconds spent before a run: from the start of the process to the command, loading, and reading the workload."""

    start: float
    load: float
    io: float


def finish_seconds(report: JobReport, before: Before) -> None:
    """Complete the report's times with what happened before the run."""
    seconds = report.seconds
    seconds.start, seconds.load, seconds.io = before.start, before.load, before.io
    seconds.wall = before.start + before.load + before.io + seconds.run
    report.peak_rss_mb = peak_rss_mb()


def _results(engine: Engine, workload: Workload, tally: Tally, tick: Tick | None, began: float) -> Iterator[Result]:
    for request in workload.requests:
        try:
            engine.add(request)
        except InputError as error:
            yield Result.failed(request.row, error, len(request.prompt_ids))
    while engine.num_unfinished:
        yield from engine.step()
        if tick is not None:
            tick(engine, tally.rows_done, time.perf_counter() - began)


def _take_totals(report: JobReport, tally: Tally, engine: Engine) -> None:
    """What the rows came to; tokens are the engine's, which knows those of rows that did not end."""
    rows, stats = report.rows_total, engine.stats
    tally.fill(report)
    report.rows_total, report.stats = rows, stats
    report.prompt_tokens, report.cached_prompt_tokens = stats.prompt_tokens, stats.cached_prompt_tokens
    report.output_tokens = stats.output_tokens
    report.settings, report.choices = dict(engine.settings), list(engine.choices)
    report.seconds.take(stats.seconds)


def _both(first: Callable[[StepShape], None], second: Callable[[StepShape], None]) -> Callable[[StepShape], None]:
    def listen(shape: StepShape) -> None:
        first(shape)
        second(shape)

    return listen
