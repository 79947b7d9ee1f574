"""One bad row must not cost the others: when a step fails, find the rows that make it fail.

The step is computed again in halves until each failing part is a single row. That is safe because a step writes
nothing that the same step would not write again, and changes no token because rows do not see their neighbours.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from batchinfer.core.plan import Drafts, Plan, StepResult
from batchinfer.core.request import RowError
from batchinfer.errors import EngineFault, is_out_of_memory
from batchinfer.runtime.data_plane import DataPlane

SURELY_NOT_THE_ROWS = 8  # so many rows failing, each alone, and none succeeding meanwhile: the fault is not theirs


class Isolation:
    """Computes a failed step in parts."""

    def __init__(self, device: DataPlane, drafts: Callable[[Plan], Drafts]) -> None:
        self._device = device
        self._drafts = drafts
        self._failed_since_success = 0

    def succeeded(self) -> None:
        """A step went well."""
        self._failed_since_success = 0

    def retry(self, plan: Plan, error: Exception) -> StepResult:
        """The step's result with the culprits among its failures.

        Raises `EngineFault` when many rows fail and none succeeds: then the fault is the engine's or the device's.
        """
        tokens: dict[int, int] = {}
        failures: dict[int, RowError] = {}
        self._halves(plan, error, tokens, failures)
        self._failed_since_success = self._failed_since_success + len(failures) if len(failures) == len(plan.slots) else 0
        if self._failed_since_success >= SURELY_NOT_THE_ROWS:
            raise EngineFault(
                f"{self._failed_since_success} rows failed, each by itself, so the fault is not theirs: {_words(error)}"
            ) from error
        sampling = plan.slots[plan.samples].tolist()
        return StepResult(np.array([tokens.get(slot, 0) for slot in sampling], np.int32), failures)

    def _halves(self, plan: Plan, error: Exception, tokens: dict[int, int], failures: dict[int, RowError]) -> None:
        count = len(plan.slots)
        if count == 1:
            code = "out_of_memory" if is_out_of_memory(error) else "engine_error"
            failures[int(plan.slots[0])] = RowError(code, f"this row makes the engine fail: {_words(error)}")
            return
        for part in (plan.part(np.arange(count // 2)), plan.part(np.arange(count // 2, count))):
            try:
                batch = self._device.batcher.build(part, self._drafts(part))
                result = self._device.head.decide(self._device.runner.forward(batch), batch)
            except Exception as again:
                self._halves(part, again, tokens, failures)
            else:
                tokens.update(zip(part.slots[part.samples].tolist(), result.token_ids.tolist(), strict=True))
                failures.update(result.failures)


def _words(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:300]}"
