"""How long rows wait: for their first token, from admission on, and between tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from batchinfer.core.stats import StepShape


@dataclass(frozen=True, slots=True)
class Waits:
    """Median, 90th and 99th percentile of some waits, in milliseconds."""

    median: float
    p90: float
    p99: float
    count: int

    @classmethod
    def of(cls, seconds: np.ndarray) -> Waits | None:
        """The percentiles of waits in seconds, float64 [n]; None when there are none."""
        if not len(seconds):
            return None
        median, p90, p99 = np.percentile(seconds, (50, 90, 99)) * 1e3
        return cls(float(median), float(p90), float(p99), len(seconds))

    @classmethod
    def mean_of(cls, several: list[Waits | None]) -> Waits | None:
        """The mean of percentiles that were taken in several runs of the same work."""
        found = [waits for waits in several if waits is not None]
        if not found:
            return None
        return cls(
            float(np.mean([waits.median for waits in found])),
            float(np.mean([waits.p90 for waits in found])),
            float(np.mean([waits.p99 for waits in found])),
            sum(waits.count for waits in found),
        )

    def as_dict(self) -> dict[str, Any]:
        """For a JSON report, in milliseconds."""
        return {"p50": round(self.median, 3), "p90": round(self.p90, 3), "p99": round(self.p99, 3)}

    def in_words(self) -> str:
        """For people: `median 12.3 ms, 99th percentile 45 ms`."""
        return f"median {in_ms(self.median)}, 99th percentile {in_ms(self.p99)}"


def in_ms(value: float) -> str:
    """Milliseconds as people read them: `3.2 ms`, `45 ms`, `1,250 ms`."""
    return f"{value:.1f} ms" if value < 9.95 else f"{value:,.0f} ms"


class LatencyLog:
    """Follows every answer to every row from step to step. Call it with every `StepShape`, as soon as the step has ended.

    A row's time to first token counts from the beginning of the step that admitted it. When a step appends several
    tokens to a row, as with drafts, the wait since the row's last token is shared among them. Waits include what lies
    between steps, and a preempted row's wait for being admitted again.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._admitted_at = np.zeros((0, 1))  # seconds, by row and answer
        self._last_at = np.zeros((0, 1))
        self._first_waits: list[np.ndarray] = []
        self._token_waits: list[np.ndarray] = []

    def __call__(self, shape: StepShape) -> None:
        """Count one step."""
        rows, choices, emitted, first = shape.rows, shape.choices, shape.emitted, shape.first
        if not len(rows):
            return
        now = self._clock()
        self._make_room(int(rows.max()) + 1, int(choices.max()) + 1)
        if shape.admitted.any():
            self._admitted_at[rows[shape.admitted], choices[shape.admitted]] = now - shape.seconds
        if first.any():
            self._first_waits.append(now - self._admitted_at[rows[first], choices[first]])
            self._last_at[rows[first], choices[first]] = now  # tokens that come with the first one keep nobody waiting
        later = (emitted - first) > 0
        if later.any():
            count = (emitted - first)[later]
            waits = (now - self._last_at[rows[later], choices[later]]) / count
            self._token_waits.append(waits if count.max() == 1 else np.repeat(waits, count))
            self._last_at[rows[later], choices[later]] = now

    @property
    def ttft(self) -> Waits | None:
        """Times to first token, one for each row that has one."""
        return Waits.of(_joined(self._first_waits))

    @property
    def itl(self) -> Waits | None:
        """Inter-token latencies: one for each token but the first of its row."""
        return Waits.of(_joined(self._token_waits))

    def _make_room(self, rows: int, choices: int) -> None:
        had, wide = self._last_at.shape
        if rows > had or choices > wide:
            more = ((0, max(rows, 2 * had) - had if rows > had else 0), (0, max(choices - wide, 0)))
            self._admitted_at, self._last_at = np.pad(self._admitted_at, more), np.pad(self._last_at, more)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0)
