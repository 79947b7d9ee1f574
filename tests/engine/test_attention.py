"""Paged attention against a dense softmax, and its independence of chunks, blocks and neighbours."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from batchinfer.attention.base import AttnInputs, AttnSpec
from batchinfer.attention.kv_cache import KV_FORMATS, KVCache
from batchinfer.attention.native import NativeAttention, why_not_native
from batchinfer.attention.reference import ReferenceAttention
from batchinfer.ops.native.library import load_native


class Stream:
    """One sequence's q, k, v, fed to a paged cache span by span."""

    def __init__(self, spec: AttnSpec, length: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.q = torch.randn(length, spec.num_heads, spec.head_dim, generator=g)
        self.k = torch.randn(length, spec.num_kv_heads, spec.head_dim, generator=g)
        self.v = torch.randn(length, spec.num_kv_heads, spec.head_dim, generator=g)


def dense(spec: AttnSpec, s: Stream) -> torch.Tensor:
    group = spec.num_heads // spec.num_kv_heads
    k, v = s.k.repeat_interleave(group, 1).double(), s.v.repeat_interleave(group, 1).double()
    scores = torch.einsum("qhd,khd->hqk", s.q.double(), k) * spec.scale
    scores += torch.full(scores.shape[1:], -torch.inf, dtype=torch.double).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(s.q), -1).float()


NATIVE = load_native()
BACKENDS = ["reference", pytest.param("native", marks=pytest.mark.skipif(NATIVE.library is None, reason=NATIVE.reason))]


def backend_for(name: str, cache: KVCache) -> ReferenceAttention | NativeAttention:
    if name == "reference":
        return ReferenceAttention(cache, torch.device("cpu"))
    assert NATIVE.library is not None
    return NativeAttention(cache, NATIVE.library)


def paged(
    name: str,
    spec: AttnSpec,
    streams: list[Stream],
    block_size: int,
    spans: list[list[int]],
    kv: str = "float32",
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """`spans[t][i]` tokens of stream i in step t; blocks are scattered, and unused ones hold large numbers."""
    longest = max(len(s.q) for s in streams)
    per_row = -(-longest // block_size)
    cache = KVCache(spec, 1, 1 + per_row * len(streams), block_size, KV_FORMATS[kv], torch.device("cpu"))
    backend = backend_for(name, cache)
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
            write_block=table[slots, positions // block_size].astype(np.int64),
            write_offset=(positions % block_size).astype(np.int64),
        )
        take = [slice(done[i], done[i] + counts[i]) for i in rows]
        q, k, v = (torch.cat([getattr(streams[i], part)[s].to(dtype) for i, s in zip(rows, take, strict=True)]) for part in "qkv")
        out = backend.bind(inputs)(0, q, k, v)
        for i, begin, n in zip(rows, inputs.query_start, count, strict=False):
            outs[i].append(out[begin : begin + n])
            done[i] += n
    return [torch.cat(o) for o in outs]


SPECS = [AttnSpec(9, 3, 64, 0.125), AttnSpec(4, 4, 16, 0.25), AttnSpec(8, 1, 32, 0.2), AttnSpec(32, 8, 128, 0.088)]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.num_heads}x{s.num_kv_heads}x{s.head_dim}")
@pytest.mark.parametrize("block_size", [8, 32, 64, 256])
def test_equals_dense_softmax(name: str, spec: AttnSpec, block_size: int) -> None:
    streams = [Stream(spec, n, i) for i, n in enumerate((1, 63, 64, 65, 200))]
    prefill_all = [[len(s.q) for s in streams]]
    for expected, got in zip((dense(spec, s) for s in streams), paged(name, spec, streams, block_size, prefill_all), strict=True):
        assert torch.allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("kv", "dtype"), [("float32", torch.float32), ("bf16", torch.float32), ("bf16", torch.bfloat16), ("float32", torch.bfloat16)]
)
def test_chunks_blocks_and_neighbours_change_no_bit(name: str, kv: str, dtype: torch.dtype) -> None:
    spec = AttnSpec(9, 3, 64, 0.125)
    streams = [Stream(spec, n, i) for i, n in enumerate((150, 70, 131))]
    whole = paged(name, spec, streams, 32, [[150, 70, 131]], kv, dtype)
    rng = np.random.default_rng(4)
    for block_size, _ in itertools.product((8, 64, 128), range(2)):
        left, spans = [150, 70, 131], []
        while any(left):
            counts = [int(min(n, rng.choice((0, 1, 1, 2, 7, 40)))) for n in left]
            spans.append(counts)
            left = [a - b for a, b in zip(left, counts, strict=True)]
        spans = [c for c in spans if any(c)]
        for one, other in zip(whole, paged(name, spec, streams, block_size, spans, kv, dtype), strict=True):
            assert torch.equal(one, other)
    alone = paged(name, spec, streams[:1], 32, [[1]] * 150, kv, dtype)[0]
    assert torch.equal(alone, whole[0])


@pytest.mark.skipif(NATIVE.library is None, reason=NATIVE.reason)
@pytest.mark.parametrize("kv", ["float32", "bf16"])
def test_native_equals_the_reference(kv: str) -> None:
    """On large and flat scores alike, with the same stored keys and values."""
    for spec, size in ((AttnSpec(16, 4, 96, 3.0), 16), (AttnSpec(12, 12, 64, 1e-3), 32), (AttnSpec(64, 4, 128, 0.1), 8)):
        streams = [Stream(spec, n, i) for i, n in enumerate((257, 33, 1))]
        spans = [[200, 1, 1], [57, 32, 0]]
        for one, other in zip(*(paged(name, spec, streams, size, spans, kv) for name in ("reference", "native")), strict=True):
            assert torch.allclose(one, other, atol=3e-5, rtol=1e-4)


def test_shapes_that_the_native_kernel_refuses_are_named() -> None:
    assert why_not_native(AttnSpec(9, 3, 64, 1.0), 32) is None
    assert "head_dim 8" in str(why_not_native(AttnSpec(4, 2, 8, 1.0), 32))
    assert "query heads" in str(why_not_native(AttnSpec(32, 1, 64, 1.0), 32))
