"""Paged attention against a dense softmax, and its independence of chunks, blocks and neighbours."""

from __future__ import annotations

import itertools

import pytest
import torch

from batchinfer.attention.base import AttnSpec
from batchinfer.attention.native import why_not_native
from tests.attention.streams import BACKENDS, NATIVE, NATIVE_BACKENDS, Setting, Stream, dense, paged, ragged_spans

SPECS = [
    AttnSpec(9, 3, 64, 0.125),
    AttnSpec(4, 4, 16, 0.25),
    AttnSpec(8, 1, 32, 0.2),
    AttnSpec(32, 8, 128, 0.088),
    AttnSpec(5, 1, 96, 0.1),
    AttnSpec(14, 2, 256, 0.06),
]
BF16, FLOAT32 = torch.bfloat16, torch.float32
# Largest difference on normal data: float32 rounding, bf16 rounding of weights and stored values, 8-bit keys and values.
TOLERANCE = {"float32": 2e-5, "bf16": 2e-2, "int8": 4e-2}
STORED = [("float32", FLOAT32), ("bf16", BF16), ("bf16", FLOAT32), ("float32", BF16), ("int8", BF16), ("int8", FLOAT32)]


def name_of(spec: AttnSpec) -> str:
    return f"{spec.num_heads}x{spec.num_kv_heads}x{spec.head_dim}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", SPECS, ids=name_of)
@pytest.mark.parametrize("kv", ["float32", "bf16", "int8"])
def test_equals_dense_softmax(backend: str, spec: AttnSpec, kv: str) -> None:
    streams = [Stream(spec, n, i) for i, n in enumerate((1, 63, 64, 65, 200))]
    setting = Setting(backend, kv=kv, angle=0.01)
    for block_size in (16, 32, 256):
        got = paged(spec, streams, [[s.length for s in streams]], setting.but(block_size=block_size))
        for expected, one in zip((dense(spec, s, setting) for s in streams), got, strict=True):
            assert torch.allclose(one, expected, atol=TOLERANCE[kv])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [1, 40, 64, 100])
@pytest.mark.parametrize("kv", ["float32", "int8"])
def test_sliding_windows_and_soft_caps(backend: str, window: int, kv: str) -> None:
    spec = AttnSpec(6, 2, 32, 0.5, windows=(None, window), softcap=3.0)
    streams = [Stream(spec, n, i) for i, n in enumerate((1, 150, 260))]
    for layer in (0, 1):
        setting = Setting(backend, kv=kv, layer=layer)
        whole = paged(spec, streams, [[1, 150, 260]], setting)
        for expected, one in zip((dense(spec, s, setting) for s in streams), whole, strict=True):
            assert torch.allclose(one, expected, atol=TOLERANCE[kv])
        pieces = paged(spec, streams, ragged_spans([1, 150, 260], 5), setting.but(block_size=64))
        assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kv", "dtype"), STORED)
def test_chunks_blocks_and_neighbours_change_no_bit(backend: str, kv: str, dtype: torch.dtype) -> None:
    for spec in (AttnSpec(9, 3, 64, 0.125), AttnSpec(4, 4, 32, 0.2), AttnSpec(5, 1, 96, 0.1)):
        lengths = [150, 70, 131]
        streams = [Stream(spec, n, i) for i, n in enumerate(lengths)]
        setting = Setting(backend, kv=kv, dtype=dtype, angle=0.02)
        whole = paged(spec, streams, [lengths], setting)
        for block_size, seed in itertools.product((16, 32, 64, 128), range(2)):
            got = paged(spec, streams, ragged_spans(lengths, seed), setting.but(block_size=block_size))
            assert all(torch.equal(a, b) for a, b in zip(whole, got, strict=True)), (block_size, seed)
        alone = paged(spec, streams[:1], [[1]] * 150, setting)[0]
        assert torch.equal(alone, whole[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1e-38, 1e-19, 1e3, 1e14])
def test_tiny_and_huge_numbers_change_no_bit_either(backend: str, size: float) -> None:
    """Numbers and products below the normal range among them: where kernels for few and for many rows could part."""
    for spec in (AttnSpec(9, 3, 64, 0.125), AttnSpec(8, 1, 128, 1.0)):
        stream = Stream(spec, 100, 3, size)
        setting = Setting(backend, kv="bf16", dtype=FLOAT32)
        whole, alone = (paged(spec, [stream], spans, setting)[0] for spans in ([[100]], [[1]] * 100))
        assert torch.equal(alone, whole)


@pytest.mark.skipif({"native on", "native avx512"} - NATIVE.keys() != set(), reason="one variant for AVX-512 here")
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_amx_computes_8_bit_keys_and_values_as_avx512_does(dtype: torch.dtype) -> None:
    capped = AttnSpec(6, 2, 128, 0.5, windows=(40,), softcap=3.0)
    for spec in (*SPECS, AttnSpec(64, 2, 64, 0.125), AttnSpec(8, 8, 192, 0.1), capped):
        lengths = [1, 15, 64, 210]
        streams = [Stream(spec, n, i, size) for i, (n, size) in enumerate(zip(lengths, (1.0, 30.0, 1e-3, 1.0), strict=True))]
        for block_size, spans in itertools.product((16, 32, 64), ([lengths], ragged_spans(lengths, 1))):
            setting = Setting("native on", block_size, "int8", dtype, angle=0.01)
            amx, avx512 = (paged(spec, streams, spans, setting.but(backend=name)) for name in ("native on", "native avx512"))
            assert all(torch.equal(a, b) for a, b in zip(amx, avx512, strict=True)), (spec, block_size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_an_8_bit_product_are_scaled_first(backend: str) -> None:
    spec = AttnSpec(9, 3, 64, 0.125)
    streams = [Stream(spec, 90, 1), Stream(spec, 7, 2)]
    setting = Setting(backend, angle=0.03)
    plain, scaled = (paged(spec, streams, [[90, 7]], setting.but(scaled=flag)) for flag in (False, True))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(plain, scaled, strict=True))


@pytest.mark.parametrize("backend", NATIVE_BACKENDS)
@pytest.mark.parametrize("kv", ["float32", "bf16", "int8"])
def test_native_equals_the_reference_on_the_same_stored_values(backend: str, kv: str) -> None:
    """On large and flat scores alike. What is left of the 16-bit and bf16 weights is stated here."""
    tolerance = {"float32": 3e-5, "bf16": 1.6e-2, "int8": 2e-3}[kv]
    for spec, size in ((AttnSpec(16, 4, 96, 0.5), 16), (AttnSpec(12, 12, 64, 1e-3), 32), (AttnSpec(64, 4, 128, 0.1), 128)):
        streams = [Stream(spec, n, i) for i, n in enumerate((257, 33, 1))]
        for dtype in (BF16,) if kv == "bf16" else (FLOAT32,):
            results = [
                paged(spec, streams, [[200, 1, 1], [57, 32, 0]], Setting(name, size, kv, dtype, angle=0.01))
                for name in ("reference", backend)
            ]
            for one, other in zip(*results, strict=True):
                assert torch.allclose(one.float(), other.float(), atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv", ["float32", "bf16", "int8"])
def test_a_row_that_is_no_number_stays_alone(backend: str, kv: str) -> None:
    spec = AttnSpec(9, 3, 64, 0.125)
    streams = [Stream(spec, 80, i) for i in range(3)]
    setting = Setting(backend, kv=kv)
    spans = [[40, 40, 40], *([[1, 1, 1]] * 40)]
    clean = paged(spec, streams, spans, setting)
    for poison in (torch.nan, torch.inf):
        streams[1].qkv[50, :] = poison
        got = paged(spec, streams, spans, setting)
        assert torch.equal(got[0], clean[0])
        assert torch.equal(got[2], clean[2])
        assert torch.equal(got[1][:50], clean[1][:50])
        assert got[1][50:].isnan().any(dim=1).all()


def test_shapes_that_the_native_kernel_refuses_are_named() -> None:
    assert why_not_native(AttnSpec(9, 3, 64, 1.0), 32) is None
    assert "head_dim 8" in str(why_not_native(AttnSpec(4, 2, 8, 1.0), 32))
    assert "query heads" in str(why_not_native(AttnSpec(512, 1, 64, 1.0), 32))
    assert "block size 8" in str(why_not_native(AttnSpec(9, 3, 64, 1.0), 8))
