"""How far two runs of the same rows said the same, token by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of the rows that both runs finished."""

    rows: int
    identical: int  # rows with the same tokens from beginning to end
    tokens: int  # of the first run
    before_difference: int  # of those, tokens before their row's first difference
    until_difference: float | None  # mean tokens before the first difference, of the rows that have one

    @classmethod
    def of(cls, first: Mapping[int, np.ndarray], second: Mapping[int, np.ndarray]) -> Agreement:
        """Compare outputs by row, int32 token ids each."""
        identical = tokens = same = 0
        rows = [row for row in first if row in second]
        differing: list[int] = []
        for row in rows:
            one, other = first[row], second[row]
            shared = min(len(one), len(other))
            unequal = np.flatnonzero(one[:shared] != other[:shared])
            until = int(unequal[0]) if len(unequal) else shared
            tokens += len(one)
            same += until
            if until == len(one) == len(other):
                identical += 1
            else:
                differing.append(until)
        return cls(len(rows), identical, tokens, same, float(np.mean(differing)) if differing else None)

    @property
    def share(self) -> float | None:
        """Share of tokens before their row's first difference; None when nothing can be compared."""
        return self.before_difference / self.tokens if self.tokens else None

    @property
    def identical_share(self) -> float | None:
        """Share of rows that are the same from beginning to end."""
        return self.identical / self.rows if self.rows else None

    def as_dict(self) -> dict[str, Any]:
        """For a JSON report."""
        return {
            "token_agreement": None if self.share is None else round(self.share, 4),
            "rows_identical": None if self.identical_share is None else round(self.identical_share, 4),
            "tokens_until_first_difference": None if self.until_difference is None else round(self.until_difference, 2),
        }

    def in_words(self) -> str:
        """For people: `100 %`, or `62 %, first difference after 41 tokens`."""
        if self.share is None:
            return ""
        if self.until_difference is None:
            return "100%"
        return f"{self.identical_share:.0%} of rows, others after {self.until_difference:.0f} tokens"
