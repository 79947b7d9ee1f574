"""How long a job's rows are: their prompts, and what they may generate, once for each answer that they ask for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from batchinfer.core.request import Request


@dataclass(frozen=True, slots=True)
class RowLengths:
    """Tokens of every row that can run: int64 arrays [R]. A row of several answers holds its prompt once, where it is shared."""

    prompts: np.ndarray
    outputs: np.ndarray  # most tokens of one answer
    answers: np.ndarray  # `n`

    @classmethod
    def of(cls, rows: Iterable[Request]) -> RowLengths:
        """Those of some rows, as they ask."""
        found = [(len(row.prompt_ids), row.params.max_tokens, row.params.n) for row in rows]
        prompts, outputs, answers = np.array(found, np.int64).reshape(-1, 3).T
        return cls(prompts, outputs, answers)

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def num_answers(self) -> int:
        """Of all rows."""
        return int(self.answers.sum())

    @property
    def generated(self) -> np.ndarray:
        """Most tokens of all answers of each row, int64 [R]."""
        made: np.ndarray = self.outputs * self.answers
        return made

    def per_answer(self) -> np.ndarray:
        """Prompt and output tokens of every answer, sharing nothing, int64: what a pool is sized by."""
        return np.repeat(self.prompts + self.outputs, self.answers)

    def held(self, shared: bool) -> np.ndarray:
        """Tokens that each row holds when all its answers run, int64 [R]."""
        made: np.ndarray = self.generated + self.prompts * (1 if shared else self.answers)
        return made

    def blocks(self, size: int, most: int, shared: bool) -> int:
        """Blocks of `size` tokens for as many of the longest answers as may run at once, `most`.

        Where a prompt is shared, the answers of a row share its full blocks; each has a copy of the last one.
        """
        order = np.argsort(-(self.prompts + self.outputs), kind="stable")
        prompts, outputs, answers = self.prompts[order], self.outputs[order], self.answers[order]
        running = np.clip(most - (np.cumsum(answers) - answers), 0, answers)
        once = np.where(running > 0, prompts // size, 0) if shared else np.zeros_like(prompts)
        return int((once + running * (-(-(prompts + outputs) // size) - (prompts // size if shared else 0))).sum())
