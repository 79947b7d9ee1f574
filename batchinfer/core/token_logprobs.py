"""How likely tokens were: the record that results carry."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True, eq=False)
class TokenLogprobs:
    """Of each of N tokens: its own log-probability, and the K most likely tokens of its place, the most likely first."""

    logprobs: np.ndarray  # float32 [N], NaN where there is none
    top_ids: np.ndarray  # int32 [N, K]
    top_logprobs: np.ndarray  # float32 [N, K]

    @classmethod
    def unknown(cls, count: int, alternatives: int) -> TokenLogprobs:
        """Nothing known yet. Pages cost memory only once they are written."""
        return cls(np.zeros(count, np.float32), np.zeros((count, alternatives), np.int32), np.zeros((count, alternatives), np.float32))

    def part(self, start: int, stop: int) -> TokenLogprobs:
        """A copy of some tokens' numbers."""
        return TokenLogprobs(self.logprobs[start:stop].copy(), self.top_ids[start:stop].copy(), self.top_logprobs[start:stop].copy())
