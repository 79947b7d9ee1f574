"""Counting a job as it runs: totals for the report, snapshots for the faces."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from batchinfer.core.request import FinishReason, Result
from batchinfer.io.truncate import SKIPPED
from batchinfer.job.records import JobReport, JobSnapshot
from batchinfer.job.rows_in import RowStream

if TYPE_CHECKING:
    from batchinfer.core.stats import RunStats

TICK_SECONDS = 0.1
RATE_SECONDS = 10.0  # rates are over this long
PROMPT_WEIGHT = 0.2  # what a prompt token costs beside a generated one, roughly, on any device
KEPT_ERRORS = 5


class FailedRanges:
    """Positions of failed rows as ranges, added in any order."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._ranges: list[tuple[int, int]] = []

    def add(self, row: int) -> None:
        """Note a failed row."""
        self._rows.append(row)
        if len(self._rows) >= 65_536:
            self._ranges, self._rows = self.ranges(), []

    def ranges(self) -> list[tuple[int, int]]:
        """Sorted ranges, last one included."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self._ranges, *((row, row) for row in self._rows)]):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        return merged


@dataclass(slots=True)
class Tally:
    """What has happened to rows so far, earlier runs included."""

    rows_done: int = 0
    rows_failed: int = 0
    rows_clipped: int = 0
    rows_truncated: int = 0
    rows_skipped: int = 0  # of the done ones: left out on request, neither good nor failed
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    finished_here: int = 0  # good rows of this run
    finish_reasons: dict[str, int] = field(default_factory=dict)
    error_codes: dict[str, int] = field(default_factory=dict)
    first_errors: list[str] = field(default_factory=list)
    failed: FailedRanges = field(default_factory=FailedRanges)

    def add(self, result: Result) -> None:
        """Count a row that has just ended."""
        reason = result.finish_reason.value if result.error is None else FinishReason.ERROR.value
        self._count(reason)
        self.prompt_tokens += result.num_prompt_tokens
        if result.error is not None:
            self._failed(result.row, result.error.code, result.error.message)
            return
        self.finished_here += 1
        self.rows_clipped += result.clipped
        self.cached_prompt_tokens += result.num_cached_tokens
        self.output_tokens += result.num_generated_tokens

    def add_stored(self, row: int, reason: str, error: dict[str, str] | None) -> None:
        """Count a row that an earlier run finished."""
        self._count(reason)
        if error is not None:
            self._failed(row, error["code"], error["message"])

    def _count(self, reason: str) -> None:
        self.rows_done += 1
        self.finish_reasons[reason] = self.finish_reasons.get(reason, 0) + 1

    def _failed(self, row: int, code: str, message: str) -> None:
        if code == SKIPPED:
            self.rows_skipped += 1
            return
        self.rows_failed += 1
        self.error_codes[code] = self.error_codes.get(code, 0) + 1
        self.failed.add(row)
        if len(self.first_errors) < KEPT_ERRORS:
            self.first_errors.append(f"{code}: {message}")

    def fill(self, report: JobReport) -> None:
        """Write the totals into the report."""
        report.rows_total = self.rows_done
        report.rows_failed = self.rows_failed
        report.rows_ok = self.rows_done - self.rows_failed - self.rows_skipped
        report.rows_truncated = self.rows_truncated
        report.rows_skipped = self.rows_skipped
        report.rows_clipped = self.rows_clipped
        report.prompt_tokens = self.prompt_tokens
        report.cached_prompt_tokens = self.cached_prompt_tokens
        report.output_tokens = self.output_tokens
        report.finish_reasons = self.finish_reasons
        report.error_codes = self.error_codes
        report.first_errors = self.first_errors
        report.failed_positions = self.failed.ranges()


class Progress:
    """Makes snapshots, ten a second at most."""

    def __init__(self, tally: Tally, stream: RowStream, stats: RunStats) -> None:
        self._tally = tally
        self._stream = stream
        self._stats = stats
        self._began = perf_counter()
        self._last = 0.0
        self._points: deque[tuple[float, int, int]] = deque([(self._began, 0, 0)])

    def due(self) -> bool:
        """True when it is time for another snapshot."""
        return perf_counter() - self._last >= TICK_SECONDS

    def snapshot(self) -> JobSnapshot:
        """The state now."""
        now = self._last = perf_counter()
        stats, tally = self._stats, self._tally
        points = self._points
        points.append((now, stats.prompt_tokens, stats.output_tokens))
        while len(points) > 2 and now - points[0][0] > RATE_SECONDS:
            points.popleft()
        then, prompt_then, output_then = points[0]
        span = max(now - then, 1e-6)
        return JobSnapshot(
            rows_done=tally.rows_done,
            rows_failed=tally.rows_failed,
            rows_read=self._stream.num_read,
            num_rows=self._stream.num_rows,
            running=stats.running,
            waiting=stats.waiting,
            prompt_tokens=stats.prompt_tokens,
            output_tokens=stats.output_tokens,
            blocks_used=stats.blocks_used,
            blocks_total=stats.blocks_total,
            prefix_hit_rate=stats.prefix_hit_rate,
            preemptions=stats.preemptions,
            elapsed_s=now - self._began,
            fraction_read=self._stream.fraction_read(),
            eta_s=self._eta(now - self._began),
            input_tokens_per_s=(stats.prompt_tokens - prompt_then) / span,
            output_tokens_per_s=(stats.output_tokens - output_then) / span,
        )

    def _eta(self, elapsed: float) -> float | None:
        """Seconds left, by tokens: what rows cost so far, for the rows that are left."""
        tally, stats = self._tally, self._stats
        share = self._stream.fraction_read()
        if tally.finished_here == 0 or share <= 0:
            return None
        rows = self._stream.num_rows or self._stream.num_read / share
        per_row = PROMPT_WEIGHT * tally.prompt_tokens / max(tally.rows_done, 1) + tally.output_tokens / tally.finished_here
        spent = PROMPT_WEIGHT * stats.prompt_tokens + stats.output_tokens
        left = max(0.0, per_row * (rows - tally.rows_done) - max(0.0, stats.output_tokens - tally.output_tokens))
        return elapsed * left / spent if spent else None
