"""Sequences fed to a paged cache span by span, and what a dense softmax makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from batchinfer.attention.base import AttentionBackend, AttnInputs, AttnSpec
from batchinfer.attention.kv_cache import KV_FORMATS, KVCache
from batchinfer.attention.native import NativeAttention
from batchinfer.attention.reference import ReferenceAttention
from batchinfer.ops.reference import rotary
from batchinfer.ops.rows import Product, ScaledRows
from tests.ops.native_tables import VARIANTS, native_variant

NATIVE = {f"native {variant}": native_variant(variant) for variant in VARIANTS}
NATIVE_BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(native.library is None, reason=native.reason)) for name, native in NATIVE.items()
]
BACKENDS = ["reference", *NATIVE_BACKENDS]


class Stream:
    """One sequence's q, k, v rows, side by side as the fused product gives them: float32 [length, (heads + 2 * kv_heads) * D]."""

    def __init__(self, spec: AttnSpec, length: int, seed: int, size: float = 1.0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.qkv = torch.randn(length, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, generator=g) * size
        self.length = length


@dataclass(frozen=True)
class Setting:
    """How streams are run."""

    backend: str = "reference"
    block_size: int = 32
    kv: str = "float32"
    dtype: torch.dtype = torch.float32
    layer: int = 0
    angle: float = 0.0  # radians per position of the slowest pair; 0: no rotation
    scaled: bool = False  # rows come as an 8-bit product gives them

    def but(self, **changes: object) -> Setting:
        return replace(self, **changes)  # type: ignore[arg-type]


def angles(positions: torch.Tensor, spec: AttnSpec, angle: float) -> tuple[torch.Tensor, torch.Tensor]:
    half = spec.head_dim // 2
    turn = positions.float()[:, None, None] * angle * torch.linspace(1, 3, half)
    return turn.cos(), turn.sin()


def dense(spec: AttnSpec, s: Stream, setting: Setting) -> torch.Tensor:
    """Softmax over everything visible, in double precision, on the rotated rows."""
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    q, k, v = s.qkv.to(setting.dtype).split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    q, k, v = q.reshape(-1, heads, dim), k.reshape(-1, kv_heads, dim), v.reshape(-1, kv_heads, dim)
    q, k = rotary(q, k, *angles(torch.arange(s.length), spec, setting.angle))
    group = heads // kv_heads
    k, v = k.repeat_interleave(group, 1).double(), v.repeat_interleave(group, 1).double()
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * (scores / spec.softcap).tanh()
    visible = torch.ones(s.length, s.length, dtype=torch.bool).tril()
    window = spec.window(setting.layer)
    if window is not None:
        visible &= ~torch.ones(s.length, s.length, dtype=torch.bool).tril(-window)
    scores = scores.masked_fill(~visible, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(s.length, -1).float()


def make_backend(setting: Setting, cache: KVCache) -> AttentionBackend:
    if setting.backend == "reference":
        return ReferenceAttention(cache, torch.device("cpu"), setting.dtype)
    library = NATIVE[setting.backend].library
    assert library is not None
    return NativeAttention(cache, library, setting.dtype)


def paged(spec: AttnSpec, streams: list[Stream], spans: list[list[int]], setting: Setting) -> list[torch.Tensor]:
    """`spans[t][i]` tokens of stream i in step t; blocks are scattered."""
    size = setting.block_size
    per_row = -(-max(s.length for s in streams) // size)
    cache = KVCache(spec, setting.layer + 1, 1 + per_row * len(streams), size, KV_FORMATS[setting.kv], torch.device("cpu"))
    backend = make_backend(setting, cache)
    order = np.random.default_rng(0).permutation(per_row * len(streams)) + 1
    table = order.reshape(len(streams), per_row).astype(np.int32)
    done = [0] * len(streams)
    outs: list[list[torch.Tensor]] = [[] for _ in streams]
    for counts in spans:
        rows = [i for i, n in enumerate(counts) if n]
        start = np.array([done[i] for i in rows], np.int32)
        count = np.array([counts[i] for i in rows], np.int32)
        positions = np.concatenate([np.arange(a, a + n) for a, n in zip(start, count, strict=True)])
        slots = np.repeat(np.array(rows), count)
        inputs = AttnInputs(
            query_start=np.concatenate(([0], np.cumsum(count))).astype(np.int64),
            start=start,
            num_tokens=count,
            slots=np.array(rows, np.int32),
            block_table=table,
            write_block=table[slots, positions // size].astype(np.int64),
            write_offset=(positions % size).astype(np.int64),
        )
        qkv = torch.cat([streams[i].qkv[done[i] : done[i] + counts[i]] for i in rows])
        cos, sin = angles(torch.from_numpy(positions), spec, setting.angle)
        out = backend.bind(inputs)(setting.layer, _product(qkv, setting), cos, sin)
        for i, begin, n in zip(rows, inputs.query_start, count, strict=False):
            outs[i].append(out[begin : begin + n])
            done[i] += n
    return [torch.cat(o) for o in outs]


def _product(qkv: torch.Tensor, setting: Setting) -> Product:
    if not setting.scaled:
        return qkv.to(setting.dtype)
    scale = torch.full((len(qkv),), 0.25)  # a power of two: the rows stay what they are
    bias = torch.full((qkv.shape[1],), 0.5)
    return ScaledRows((qkv - bias) / 0.25, scale, bias)


def ragged_spans(lengths: list[int], seed: int) -> list[list[int]]:
    """Random pieces of every stream, step by step, single tokens among them."""
    rng = np.random.default_rng(seed)
    left, spans = list(lengths), []
    while any(left):
        counts = [int(min(n, rng.choice((0, 1, 1, 2, 7, 40)))) for n in left]
        left = [a - b for a, b in zip(left, counts, strict=True)]
        if any(counts):
            spans.append(counts)
    return spans
