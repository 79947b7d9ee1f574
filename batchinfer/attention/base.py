"""All that attention may know of a step, and what a backend offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, heads, D], k [T, kv_heads, D], v [T, kv_heads, D]) -> [T, heads * D]; writes KV, then attends."""


@dataclass(frozen=True, slots=True)
class AttnSpec:
    """The shape of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


@dataclass(slots=True)
class AttnInputs:
    """One step's spans. Host arrays: a backend moves to its device what it needs, once per step."""

    query_start: np.ndarray  # int64 [S + 1], rows of each span in the ragged batch
    start: np.ndarray  # int32 [S], tokens of the sequence before the span
    num_tokens: np.ndarray  # int32 [S]
    slots: np.ndarray  # int32 [S], rows of block_table
    block_table: np.ndarray  # int32 [slots, max_blocks], the live table: read it before the step ends
    write_block: np.ndarray  # int64 [T], block that each row's KV goes to
    write_offset: np.ndarray  # int64 [T], place in that block


class AttentionBackend(Protocol):
    """Paged attention for one device."""

    def bind(self, inputs: AttnInputs) -> Attend:
        """Plan the step once; the result serves all of its layers."""
