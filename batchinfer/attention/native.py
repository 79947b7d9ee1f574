"""Binding of the native paged attention (ops/native/attention.cpp) for CPUs."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchinfer.attention.base import Attend, AttnInputs, AttnSpec
from batchinfer.attention.kv_cache import KVCache

QUERIES_PER_ITEM = 16  # kQueries of the source
MAX_ROWS, MAX_DIM = 256, 256  # kMaxRows, kMaxDim


class _Args(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "out", "k", "v", "query_start", "start", "count", "slots", "block_table", "item_span", "item_first")),
        *((name, ctypes.c_int64) for name in ("table_width", "num_items", "heads", "kv_heads", "dim", "block_size")),
        ("scale", ctypes.c_float),
    ]  # fmt: skip


def why_not_native(spec: AttnSpec, block_size: int) -> str | None:
    """What about these shapes the native kernel does not do; None when it does them."""
    if spec.head_dim % 16 or spec.head_dim > MAX_DIM:
        return f"head_dim {spec.head_dim} is not a multiple of 16 up to {MAX_DIM}"
    if QUERIES_PER_ITEM * spec.num_heads // spec.num_kv_heads > MAX_ROWS:
        return f"{spec.num_heads // spec.num_kv_heads} query heads share a key head; at most {MAX_ROWS // QUERIES_PER_ITEM} do natively"
    return None if block_size & (block_size - 1) == 0 else f"block size {block_size} is not a power of two"


class NativeAttention:
    """Paged attention in one native call per layer; same claims as the reference."""

    def __init__(self, kv: KVCache, library: ctypes.CDLL) -> None:
        assert why_not_native(kv.spec, kv.block_size) is None
        self._kv = kv
        self._call = library.batchinfer_attention
        self._call.argtypes = [ctypes.POINTER(_Args), ctypes.c_int32, ctypes.c_int32]
        self._call.restype = None

    def bind(self, inputs: AttnInputs) -> Attend:
        """Lay the step's work out once: pieces of at most `QUERIES_PER_ITEM` query tokens, longest context first."""
        spec, size = self._kv.spec, self._kv.block_size
        pieces = -(-inputs.num_tokens // QUERIES_PER_ITEM)
        item_span = np.repeat(np.arange(len(pieces), dtype=np.int32), pieces)
        ends = np.cumsum(pieces)
        item_first = ((np.arange(len(item_span)) - np.repeat(ends - pieces, pieces)) * QUERIES_PER_ITEM).astype(np.int32)
        order = np.argsort(-(inputs.start[item_span] + item_first), kind="stable")
        arrays = {
            "query_start": np.ascontiguousarray(inputs.query_start, np.int64),
            "start": np.ascontiguousarray(inputs.start, np.int32),
            "count": np.ascontiguousarray(inputs.num_tokens, np.int32),
            "slots": np.ascontiguousarray(inputs.slots, np.int32),
            "block_table": inputs.block_table,
            "item_span": item_span[order],
            "item_first": item_first[order],
        }
        heads = np.arange(spec.num_kv_heads)
        cells = (inputs.write_block[:, None] * spec.num_kv_heads + heads) * size + inputs.write_offset[:, None]
        written = torch.from_numpy(cells.reshape(-1))
        args = _Args(
            **{name: array.ctypes.data for name, array in arrays.items()},
            table_width=inputs.block_table.shape[1],
            num_items=len(item_span),
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            dim=spec.head_dim,
            block_size=size,
            scale=spec.scale,
        )

        return _Step(self._kv, self._call, args, arrays, written)


class _Step:
    """One step's calls. It holds the arrays that `args` points into: they must outlive every layer."""

    def __init__(self, kv: KVCache, call: Any, args: _Args, arrays: dict[str, np.ndarray], written: Tensor) -> None:
        self._kv = kv
        self._call = call
        self._args = args
        self._arrays = arrays
        self._written = written

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v, then attend: q [T, heads, D] -> [T, heads * D]."""
        kv, args = self._kv.layers[layer], self._args
        kv.write(self._written, k, v)
        q = q.contiguous()
        out = torch.empty(q.shape[0], args.heads * args.dim, dtype=q.dtype)
        args.q, args.out, args.k, args.v = q.data_ptr(), out.data_ptr(), kv.k.data_ptr(), kv.v.data_ptr()
        self._call(args, q.dtype is torch.bfloat16, kv.k.dtype is torch.bfloat16)
        return out
