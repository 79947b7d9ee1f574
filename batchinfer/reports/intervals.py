"""What a few runs say about a number: its middle, its spread, and where its mean lies with 95 % confidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

LEVEL = 0.95
# Two-sided 95 % points of Student's t for 1, 2, ... degrees of freedom.
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def t_point(degrees: int) -> float:
    """The two-sided 95 % point of Student's t; beyond the table Cornish and Fisher's expansion of the normal one."""
    if degrees <= len(T_95):
        return T_95[degrees - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of speeds with its 95 % interval; without one when it was taken once only."""

    value: float
    low: float | None
    high: float | None
    rounds: int

    @classmethod
    def of_logs(cls, logs: Sequence[float]) -> Ratio:
        """The geometric mean of paired ratios, given as natural logarithms, and Student's interval of it."""
        mean = fmean(logs)
        if len(logs) < 2:
            return cls(math.exp(mean), None, None, len(logs))
        half = t_point(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
        return cls(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))

    @property
    def differs_from_one(self) -> bool:
        """True when the interval leaves 1.0 out."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high

    def in_words(self) -> str:
        """For people: `1.23x  (1.20 to 1.26)`."""
        return f"{times(self.value)} {self.span()}".rstrip()

    def span(self) -> str:
        """The interval alone: `1.20 to 1.26`; nothing after one round."""
        if self.low is None or self.high is None:
            return ""
        digits = 2 if self.value < 10 else 1
        return f"{self.low:,.{digits}f} to {self.high:,.{digits}f}"


def times(value: float) -> str:
    """A ratio as people write it: `1.05x`, `12.3x`, `140x`."""
    return f"{value:.2f}x" if value < 9.995 else f"{value:,.1f}x" if value < 99.95 else f"{value:,.0f}x"


@dataclass(frozen=True, slots=True)
class Spread:
    """A number measured several times: median, least and most."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(median(values), min(values), max(values), len(values))

    def as_dict(self) -> dict[str, Any]:
        """For a JSON report."""
        return {"median": round(self.median, 3), "low": round(self.low, 3), "high": round(self.high, 3), "runs": self.runs}
