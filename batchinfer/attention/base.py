"""All that attention may know of a step, and what a backend offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from batchinfer.ops.rows import Product

Attend = Callable[[int, Product, Tensor, Tensor], Tensor]
"""(layer, qkv [T, (heads + 2 * kv_heads) * D], cos and sin float32 [T, 1, rotated / 2]) -> [T, heads * D].

Rotates the first 2 * rotated / 2 entries of every query and key head (halves paired), writes keys and values to the
cache, then attends.
"""


@dataclass(frozen=True, slots=True)
class AttnSpec:
    """The shape of a model's attention layers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    windows: tuple[int | None, ...] = ()  # per layer: the last tokens that a query sees, itself included; () where all see all
    softcap: float | None = None  # scores become softcap * tanh(score / softcap) (Gemma 2)

    def window(self, layer: int) -> int | None:
        """The layer's sliding window, None where a query sees everything before it."""
        return self.windows[layer] if self.windows else None


@dataclass(slots=True)
class AttnInputs:
    """One step's spans. Host arrays: a backend moves to its device what it needs, once per step."""

    query_start: np.ndarray  # int64 [S + 1], rows of each span in the ragged batch
    start: np.ndarray  # int32 [S], tokens of the sequence before the span
    num_tokens: np.ndarray  # int32 [S]
    slots: np.ndarray  # int64 [S], rows of block_table
    block_table: np.ndarray  # int32 [slots, max_blocks], the live table: read it before the step ends
    write_block: np.ndarray  # int64 [T], block that each row's KV goes to
    write_offset: np.ndarray  # int64 [T], place in that block


class AttentionBackend(Protocol):
    """Paged attention for one device."""

    def bind(self, inputs: AttnInputs) -> Attend:
        """Plan the step once; the result serves all of its layers."""
