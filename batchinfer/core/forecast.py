"""How many KV tokens the running rows will hold at their worst moment, if each runs to its expected end.

Offline every `max_tokens` is known, so admission can look ahead (the idea of Tokasaurus's scheduler) instead of
admitting until the pool overflows. For rows that may end by EOS the expected end is learned from rows that ended.
"""

from __future__ import annotations

import numpy as np


class OutputForecast:
    """Expected number of output tokens, from the rows that have finished.

    A deterministic function of the finished rows, so every replica plans alike. Until `warmup` rows have ended, a
    row is expected to use all of its `max_tokens`.
    """

    def __init__(self, warmup: int = 32, headroom: float = 1.5) -> None:
        self._warmup = warmup
        self._headroom = headroom
        self._rows = 0
        self._tokens = 0

    def finished(self, num_output: int) -> None:
        """Learn from a row that could have ended by itself."""
        self._rows += 1
        self._tokens += num_output

    def expected(self, remaining: np.ndarray, produced: np.ndarray, exact: np.ndarray) -> np.ndarray:
        """Output tokens still to come per row: `remaining` is the limit, `exact` rows are known to reach it."""
        if self._rows < self._warmup:
            return remaining
        mean = self._mean()
        guess = np.maximum(mean - produced, mean / 2).astype(np.int64)
        return np.where(exact, remaining, np.minimum(remaining, np.maximum(guess, 1)))

    def expected_of_one(self, remaining: int, produced: int, exact: bool) -> int:
        """The same of a single row."""
        if exact or self._rows < self._warmup:
            return remaining
        mean = self._mean()
        return min(remaining, max(int(max(mean - produced, mean / 2)), 1))

    def _mean(self) -> float:
        return self._headroom * self._tokens / self._rows


def peak_tokens(held: np.ndarray, remaining: np.ndarray) -> int:
    """Largest sum of tokens held at any later step, when row i holds `held[i]` now and ends after `remaining[i]` steps.

    Rows grow by one token a step and give everything back at their end.
    """
    if not len(held):
        return 0
    order = np.argsort(remaining)  # at the end of each row, those that end no sooner stand
    ends = remaining[order]
    still_held = np.cumsum(held[order][::-1])[::-1]
    return int((still_held + np.arange(len(ends), 0, -1) * ends).max())
