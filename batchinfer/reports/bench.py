"""Throughput and step times of one configuration on one workload."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from signal import SIGINT
from typing import TYPE_CHECKING, Any

import numpy as np

from batchinfer.core.request import Result
from batchinfer.errors import InputError
from batchinfer.job import JobReport
from batchinfer.job.progress import Tally
from batchinfer.machine import peak_rss_mb, process_age_s
from batchinfer.reports.workload import Workload

if TYPE_CHECKING:
    from batchinfer.core.stats import StepShape
    from batchinfer.engine import Engine

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class StepLog:
    """Milliseconds and rows of every step. In a decode step each running row waits one step for its next token."""

    milliseconds: list[float] = field(default_factory=list)
    decoding: list[int] = field(default_factory=list)

    def __call__(self, shape: StepShape) -> None:
        """Keep one step."""
        self.milliseconds.append(shape.seconds * 1e3)
        self.decoding.append(shape.num_decode)

    def inter_token_ms(self) -> dict[str, float]:
        """Percentiles of the wait between two tokens of a row, over all tokens but each row's first."""
        weights = np.array(self.decoding, np.int64)
        if not weights.sum():
            return {}
        order = np.argsort(self.milliseconds)
        times, reached = np.array(self.milliseconds)[order], np.cumsum(weights[order])
        return {f"p{p}": round(float(times[np.searchsorted(reached, reached[-1] * p / 100)]), 3) for p in PERCENTILES}


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One measured run: the job's report, and the steps behind it."""

    report: JobReport
    steps: StepLog

    def extra_keys(self) -> dict[str, Any]:
        """What `bench --json` holds beside the keys of every report."""
        return {"itl_ms": self.steps.inter_token_ms()}


def run_workload(engine: Engine, workload: Workload, tick: Callable[[Engine, int, float], None] | None = None) -> BenchRun:
    """Run every request of a workload and report on it; `tick(engine, rows done, seconds)` is called after each step.

    Ctrl-C ends the run early: the report then holds what was measured until then, and says so.
    """
    log = StepLog()
    also = engine.on_step
    engine.on_step = _both(log, also)
    report = JobReport(input=workload.name, output="", model=str(engine.settings.get("model", "")), rows_total=len(workload.requests))
    tally, began = Tally(), time.perf_counter()
    try:
        for result in _results(engine, workload, tally, tick, began):
            tally.add(result)
    except KeyboardInterrupt:
        report.interrupted = SIGINT
        report.message = (
            f"stopped by SIGINT after {tally.rows_done:,} of {report.rows_total:,} rows: the numbers are those of the part that ran"
        )
    report.seconds.run = time.perf_counter() - began
    engine.on_step = also
    _take_totals(report, tally, engine)
    return BenchRun(report, log)


def finish_seconds(report: JobReport, load_s: float, io_s: float) -> None:
    """Complete the report's times with what happened before the run."""
    report.seconds.load, report.seconds.io = load_s, io_s
    report.seconds.wall = process_age_s() or (load_s + io_s + report.seconds.run)
    report.seconds.start = max(0.0, report.seconds.wall - report.seconds.run - load_s - io_s)
    report.peak_rss_mb = peak_rss_mb()


def _results(engine: Engine, workload: Workload, tally: Tally, tick: Callable[[Engine, int, float], None] | None, began: float) -> Any:
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
