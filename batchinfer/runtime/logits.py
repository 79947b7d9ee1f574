"""What changes logits between the head and the sampler, slice by slice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from batchinfer.ops.rows import Product, to_dense


class LogitEdit(Protocol):
    """A change to some rows' logits."""

    def apply(self, first_id: int, logits: Product) -> Product:
        """The logits [R, N] of tokens `first_id` and on as the sampler shall see them; untouched slices pass as they are."""


class NoEdit:
    """Changes nothing."""

    def apply(self, first_id: int, logits: Product) -> Product:
        """The logits as they are."""
        return logits


class Ban:
    """Tokens that a row may not say: their logits become -infinity."""

    def __init__(self, rows: np.ndarray, banned_ids: Sequence[Sequence[int]]) -> None:
        """`banned_ids[i]` are the ids that rows[i] may not say."""
        ids = np.array([i for ids in banned_ids for i in ids], np.int64)
        order = np.argsort(ids, kind="stable")
        self._ids = ids[order]
        self._rows = np.repeat(rows, [len(ids) for ids in banned_ids])[order].astype(np.int64)

    def apply(self, first_id: int, logits: Product) -> Product:
        """A slice with banned tokens comes back as plain float32 rows, every other logit as the sampler would read it."""
        width = (logits if isinstance(logits, torch.Tensor) else logits.values).shape[1]
        start, end = np.searchsorted(self._ids, (first_id, first_id + width))
        if start == end:
            return logits
        dense = to_dense(logits, torch.float32).to(torch.float32, copy=True)
        rows, ids = (torch.from_numpy(x[start:end]).to(dense.device) for x in (self._rows, self._ids - first_id))
        dense[rows, ids] = -torch.inf
        return dense
