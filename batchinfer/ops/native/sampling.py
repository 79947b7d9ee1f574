"""Binding of the native sampler (ops/native/sampling.cpp, filters.cpp)."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from batchinfer.ops.draw import MOST_TIES, Draw, Drawn, SamplingColumns, Ties, max_kept
from batchinfer.ops.rows import Product, ScaledRows

POINTER, COUNT = ctypes.c_void_p, ctypes.c_int64
DTYPES = (torch.float32, torch.bfloat16)


class _Draw(ctypes.Structure):
    _fields_ = [
        *((name, POINTER) for name in ("temperature", "top_p", "min_p", "top_k", "keys", "kept_row")),
        *((name, POINTER) for name in ("best", "best_id", "noisy", "noisy_id", "kept", "ties", "num_ties")),
        ("rows", COUNT),
        ("vocab_size", COUNT),
    ]


class _Slice(ctypes.Structure):
    _fields_ = [
        *((name, POINTER) for name in ("draw", "values", "scale")),
        *((name, COUNT) for name in ("stride", "first_id", "width")),
    ]


class _Choice(ctypes.Structure):
    _fields_ = [*((name, POINTER) for name in ("draw", "rows", "token_ids")), ("count", COUNT)]


class NativeSampler:
    """Reads every slice once, in the cache; rows are spread over torch's threads."""

    def __init__(self, library: ctypes.CDLL, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.take_slice, self.choose = library.batchinfer_take_slice, library.batchinfer_choose
        self.take_slice.argtypes, self.take_slice.restype = [ctypes.POINTER(_Slice), ctypes.c_int32], None
        self.choose.argtypes, self.choose.restype = [ctypes.POINTER(_Choice)], None
        self._kept = np.empty((0, vocab_size), np.float32)

    def begin(self, columns: SamplingColumns, rounded: bool = False) -> Draw:
        """Start on rows of which at most `max_kept(vocab_size)` filter."""
        return _NativeDraw(self, columns, rounded)

    def room_for(self, num_rows: int) -> np.ndarray:
        """Float32 [num_rows or more, V] for kept logits: the same memory every step, so that no step faults it in."""
        if num_rows > len(self._kept):
            rows = min(max(num_rows, 2 * len(self._kept)), max(num_rows, max_kept(self.vocab_size)))
            self._kept = np.empty((rows, self.vocab_size), np.float32)
        return self._kept


class _NativeDraw:
    """Holds the arrays that `_draw` points into: they live as long as the step."""

    def __init__(self, sampler: NativeSampler, columns: SamplingColumns, rounded: bool) -> None:
        self._sampler = sampler
        self._filtered = columns.filtered(sampler.vocab_size).astype(np.int32)
        rows = len(columns.temperature)
        kept_row = np.full(rows, -1, np.int32)
        kept_row[self._filtered] = np.arange(len(self._filtered))
        self._kept_row, self._columns, self._kept = kept_row, columns, sampler.room_for(len(self._filtered))
        self._best, self._noisy = np.full((2, rows), -np.inf, np.float32)
        self._best_id, self._noisy_id = np.zeros((2, rows), np.int32)
        self._ties, self._num_ties = np.empty((rows, MOST_TIES), np.int32), np.zeros(rows, np.int32)
        self._draw = _Draw(
            **{name: getattr(columns, name).ctypes.data for name in ("temperature", "top_p", "min_p", "top_k", "keys")},
            kept_row=kept_row.ctypes.data,
            best=self._best.ctypes.data,
            best_id=self._best_id.ctypes.data,
            noisy=self._noisy.ctypes.data,
            noisy_id=self._noisy_id.ctypes.data,
            kept=self._kept.ctypes.data,
            ties=self._ties.ctypes.data if rounded else None,
            num_ties=self._num_ties.ctypes.data,
            rows=rows,
            vocab_size=sampler.vocab_size,
        )

    def take(self, first_id: int, logits: Product) -> None:
        """Update every row's best, or keep its logits."""
        values, scale = _plain(logits)
        width = min(values.shape[1], self._sampler.vocab_size - first_id)
        if width <= 0:
            return
        part = _Slice(
            draw=ctypes.addressof(self._draw),
            values=values.data_ptr(),
            scale=None if scale is None else scale.data_ptr(),
            stride=values.stride(0),
            first_id=first_id,
            width=width,
        )
        self._sampler.take_slice(part, values.dtype is torch.bfloat16)

    def finish(self) -> Drawn:
        """Choose among the kept logits, and gather."""
        sound = np.isfinite(self._best)
        token_ids = np.where(self._columns.temperature > 0, self._noisy_id, self._best_id)
        rows = self._filtered[sound[self._filtered]]
        if len(rows):
            chosen = np.empty(len(rows), np.int32)
            self._sampler.choose(_Choice(ctypes.addressof(self._draw), rows.ctypes.data, chosen.ctypes.data, len(rows)))
            token_ids[rows] = chosen
        return Drawn(token_ids, sound, self._ties_of(sound))

    def _ties_of(self, sound: np.ndarray) -> Ties:
        tied = np.flatnonzero(sound & (self._num_ties > 1))
        if not len(tied):
            return Ties()
        count = self._num_ties[tied]
        rows, token_ids = np.repeat(tied, count), self._ties[tied][np.arange(MOST_TIES) < count[:, None]]
        return Ties(rows, token_ids.astype(np.int64), self._best[rows])


def _plain(logits: Product) -> tuple[Tensor, Tensor | None]:
    """Values [R, N] with neighbours side by side, and the factor of each row."""
    values, scale = (logits, None) if isinstance(logits, Tensor) else (logits.values, logits.scale.contiguous())
    assert values.dtype in DTYPES
    assert not (isinstance(logits, ScaledRows) and logits.bias is not None), "the head has no bias"
    return values if values.stride(1) == 1 else values.contiguous(), scale
