"""Per-row seconds for `--metrics`: waiting, prefill, decoding, read off the engine's record of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

from batchinfer.core.request import Request, Result
from batchinfer.core.stats import StepShape


class RowClock(Protocol):
    """What the job asks of a clock of rows."""

    def given(self, items: Iterator[Request | Result]) -> Iterator[Request | Result]:
        """The same items, noting when each is handed on."""

    def step(self, shape: StepShape) -> None:
        """A step has ended."""

    def metrics(self, result: Result) -> dict[str, Any] | None:
        """The row's metrics, told once; None for a failed row or where nobody asked."""


class NoRowTimes:
    """The clock that nobody looks at."""

    def given(self, items: Iterator[Request | Result]) -> Iterator[Request | Result]:
        """The items."""
        return items

    def step(self, shape: StepShape) -> None:
        """Do nothing."""

    def metrics(self, result: Result) -> dict[str, Any] | None:
        """None."""
        return None


@dataclass(slots=True)
class _Times:
    given: float
    admitted: float = 0.0
    first: float = 0.0


class RowTimes:
    """Notes when rows are handed to the engine, enter a batch, say their first token and end.

    Queue is the time until a row first enters a batch, prefill the time from there to its first token, decode the rest;
    what a preempted row waits for counts where it happens.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Times] = {}

    def given(self, items: Iterator[Request | Result]) -> Iterator[Request | Result]:
        """The items, each request's time noted."""
        for item in items:
            if isinstance(item, Request):
                self._rows[item.row] = _Times(perf_counter())
            yield item

    def step(self, shape: StepShape) -> None:
        """Note who entered with this step, and who said a first token."""
        now = perf_counter()
        for row in shape.rows[shape.admitted].tolist():
            self._rows[row].admitted = now - shape.seconds
        for row in shape.rows[shape.first].tolist():
            self._rows[row].first = now

    def metrics(self, result: Result) -> dict[str, Any] | None:
        """Seconds and counts of a row that has just ended."""
        times = self._rows.pop(result.row, None)
        if times is None or result.error is not None:
            return None
        now = perf_counter()
        admitted = max(times.admitted, times.given)
        first = times.first or now
        return {
            "queue_seconds": round(admitted - times.given, 6),
            "prefill_seconds": round(first - admitted, 6),
            "decode_seconds": round(now - first, 6),
            "cached_tokens": result.num_cached_tokens,
            "preemptions": result.num_preemptions,
        }
