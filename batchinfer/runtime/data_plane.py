"""The seams between the engine and what computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from batchinfer.core.drafts import clear_nothing, copy_nothing
from batchinfer.core.plan import Drafts, Plan, StepResult

if TYPE_CHECKING:
    from batchinfer.ops.table import Choice


T = TypeVar("T")


class BatchBuilder(Protocol):
    """Turns a plan into the device's ragged batch."""

    def build(self, plan: Plan, drafts: Drafts) -> Any:
        """One batch, on the device."""


class Runner(Protocol):
    """The model's forward pass."""

    def forward(self, batch: Any) -> Any:
        """Hidden states of the rows that need logits."""


class Head(Protocol):
    """From hidden states to tokens."""

    def decide(self, hidden: Any, batch: Any) -> StepResult:
        """Sample one token per sampling span; the step's one wait for the device."""


def both(first: Callable[[T], None], second: Callable[[T], None]) -> Callable[[T], None]:
    """Do the same to the blocks of two models."""

    def do(blocks: T) -> None:
        first(blocks)
        second(blocks)

    return do


@dataclass(frozen=True, slots=True)
class DataPlane:
    """The parts that compute: built together, for one device.

    `clear` zeroes the KV of blocks that hold damage, `copy` copies it from block to block; `choices` say what was chosen for it.
    """

    batcher: BatchBuilder
    runner: Runner
    head: Head
    clear: Callable[[np.ndarray], None] = clear_nothing
    copy: Callable[[list[tuple[int, int]]], None] = copy_nothing
    choices: tuple[Choice, ...] = ()
