"""One bad row must not cost the others: when a step fails, find the rows that make it fail.

The step is computed again in halves until each failing part is a single row. That is safe because a step writes
nothing that the same step would not write again, and changes no token because rows do not see their neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from batchinfer.core.plan import Plan, StepResult
from batchinfer.core.request import RowError
from batchinfer.errors import EngineFault

SURELY_NOT_THE_ROWS = 16  # so many rows failing, each alone, and none succeeding meanwhile: the fault is not theirs
OUT_OF_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """True for Python's, torch's and the allocators' ways of saying so."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in OUT_OF_MEMORY_WORDS)


@dataclass(frozen=True, slots=True)
class Fault:
    """What is kept of an exception: words only. Its traceback would hold the failed step's tensors while it is tried again."""

    words: str
    place: str  # file and line that raised it
    out_of_memory: bool

    @classmethod
    def of(cls, error: Exception) -> Fault:
        """Describe the error."""
        text = " ".join(str(error).split()) or "no message"
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace is not None else "unknown place"
        return cls(f"{type(error).__name__}: {text[:300]}", place, is_out_of_memory(error))

    def row_error(self) -> RowError:
        """The error of the row that causes it."""
        return RowError("out_of_memory" if self.out_of_memory else "engine_error", f"this row makes the engine fail: {self.words}")


class Isolation:
    """Computes a failed step in parts. `compute` runs a part of a plan and returns its result."""

    def __init__(self, compute: Callable[[Plan], StepResult]) -> None:
        self._compute = compute
        self._failed_since_success = 0

    def succeeded(self) -> None:
        """A step went well."""
        self._failed_since_success = 0

    def retry(self, plan: Plan, fault: Fault) -> StepResult:
        """The step's result with the culprits among its failures.

        A row that ran out of memory alone with several tokens is postponed: the next step takes fewer. Raises
        `EngineFault` when many rows fail and none succeeds: then the fault is the engine's or the device's.
        """
        tokens: dict[int, int] = {}
        failures: dict[int, RowError] = {}
        postponed: list[int] = []
        parts = [(plan, fault)]
        while parts:
            part, fault = parts.pop()
            count = len(part.slots)
            if count == 1:
                slot = int(part.slots[0])
                if fault.out_of_memory and int(part.num_tokens[0]) > 1:
                    postponed.append(slot)
                else:
                    failures[slot] = fault.row_error()
                continue
            for half in (part.part(np.arange(count // 2)), part.part(np.arange(count // 2, count))):
                result = self._try(half)
                if isinstance(result, Fault):
                    parts.append((half, result))
                else:
                    tokens.update(zip(half.slots[half.samples].tolist(), result.token_ids.tolist(), strict=True))
                    failures.update(result.failures)
        self._judge(len(failures) == len(plan.slots), len(failures), fault)
        sampling = plan.slots[plan.samples].tolist()
        return StepResult.single(np.array([tokens.get(slot, 0) for slot in sampling], np.int32), failures, tuple(postponed))

    def _try(self, part: Plan) -> StepResult | Fault:
        try:
            return self._compute(part)
        except Exception as error:
            return Fault.of(error)

    def _judge(self, all_failed: bool, num_failed: int, fault: Fault) -> None:
        self._failed_since_success = self._failed_since_success + num_failed if all_failed else 0
        if self._failed_since_success >= SURELY_NOT_THE_ROWS:
            raise EngineFault(
                f"{self._failed_since_success} rows failed, each by itself, so the fault is not theirs: {fault.words} ({fault.place})"
            )
