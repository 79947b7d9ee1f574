"""Binding of the native paged attention (ops/native/attention.cpp) for CPUs."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchinfer.attention.base import Attend, AttnInputs, AttnSpec
from batchinfer.attention.kv_cache import LANES, KVCache
from batchinfer.ops.rows import Product, ScaledRows

ITEM_ROWS = 64  # query tokens times query heads per key head in one work item: enough to reuse a tile of keys, few enough to share out
MAX_ROWS, MAX_DIM = 256, 256  # kMaxRows, kMaxDim of the source
POINTERS = (
    *("qkv", "row_scale", "bias", "out", "cos", "sin", "k", "v", "query_start", "start", "count", "slots", "block_table"),
    *("item_span", "item_first", "write_block", "write_offset"),
)
COUNTS = ("num_tokens", "table_width", "num_items", "item_queries", "heads", "kv_heads", "dim", "rotated", "block_size", "window")


class _Args(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in COUNTS),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_int32) for name in ("qkv_is_bf16", "run_is_bf16")),
    ]


def why_not_native(spec: AttnSpec, block_size: int) -> str | None:
    """What about these shapes the native kernel does not do; None when it does them."""
    if spec.head_dim % LANES or spec.head_dim > MAX_DIM:
        return f"head_dim {spec.head_dim} is not a multiple of {LANES} up to {MAX_DIM}"
    if spec.num_heads // spec.num_kv_heads > MAX_ROWS:
        return f"{spec.num_heads // spec.num_kv_heads} query heads share a key head; at most {MAX_ROWS} do natively"
    fits = block_size >= LANES and block_size & (block_size - 1) == 0
    return None if fits else f"block size {block_size} is not a power of two from {LANES} on"


class NativeAttention:
    """Rotary, the write of keys and values, and paged attention in one native call per layer; same claims as the reference."""

    def __init__(self, kv: KVCache, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        assert why_not_native(kv.spec, kv.block_size) is None
        assert kv.layout.lanes == LANES
        self._kv = kv
        self._dtype = dtype
        self._item_queries = max(1, ITEM_ROWS * kv.spec.num_kv_heads // kv.spec.num_heads)
        self._call = library.batchinfer_attention
        self._call.argtypes = [ctypes.POINTER(_Args), ctypes.c_int32]
        self._call.restype = None

    def bind(self, inputs: AttnInputs) -> Attend:
        """Lay the step's work out once: pieces of some query tokens, longest context first."""
        spec, most = self._kv.spec, self._item_queries
        pieces = -(-inputs.num_tokens // most)
        item_span = np.repeat(np.arange(len(pieces), dtype=np.int32), pieces)
        ends = np.cumsum(pieces)
        item_first = ((np.arange(len(item_span)) - np.repeat(ends - pieces, pieces)) * most).astype(np.int32)
        cost = (inputs.start[item_span] + item_first).astype(np.int64) * np.minimum(most, inputs.num_tokens[item_span] - item_first)
        order = np.argsort(-cost, kind="stable")
        arrays = {
            "query_start": np.ascontiguousarray(inputs.query_start, np.int64),
            "start": np.ascontiguousarray(inputs.start, np.int32),
            "count": np.ascontiguousarray(inputs.num_tokens, np.int32),
            "slots": np.ascontiguousarray(inputs.slots, np.int32),
            "block_table": inputs.block_table,
            "item_span": item_span[order],
            "item_first": item_first[order],
            "write_block": np.ascontiguousarray(inputs.write_block, np.int64),
            "write_offset": np.ascontiguousarray(inputs.write_offset, np.int64),
        }
        args = _Args(
            **{name: array.ctypes.data for name, array in arrays.items()},
            num_tokens=len(inputs.write_block),
            table_width=inputs.block_table.shape[1],
            num_items=len(item_span),
            item_queries=most,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            dim=spec.head_dim,
            block_size=self._kv.block_size,
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
            run_is_bf16=self._dtype is torch.bfloat16,
        )
        return _Step(self._kv, self._call, args, arrays, self._dtype)


class _Step:
    """One step's calls. It holds the arrays that `args` points into: they must outlive every layer."""

    def __init__(self, kv: KVCache, call: Any, args: _Args, arrays: dict[str, np.ndarray], dtype: torch.dtype) -> None:
        self._kv = kv
        self._call = call
        self._args = args
        self._arrays = arrays
        self._dtype = dtype

    def __call__(self, layer: int, qkv: Product, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate, write keys and values, attend: [T, (heads + 2 * kv_heads) * D] -> [T, heads * D]."""
        kv, args = self._kv.layers[layer], self._args
        scaled = qkv if isinstance(qkv, ScaledRows) else None
        values = (qkv.values if isinstance(qkv, ScaledRows) else qkv).contiguous()
        out = torch.empty(values.shape[0], args.heads * args.dim, dtype=self._dtype)
        args.qkv, args.out, args.k, args.v = values.data_ptr(), out.data_ptr(), kv.k.data_ptr(), kv.v.data_ptr()
        args.row_scale = scaled.scale.data_ptr() if scaled else None
        args.bias = scaled.bias.data_ptr() if scaled and scaled.bias is not None else None
        args.cos, args.sin, args.rotated = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
        args.window = self._kv.spec.window(layer) or 0
        args.qkv_is_bf16 = values.dtype is torch.bfloat16
        self._call(args, self._kv.format.dtype.itemsize)
        return out
