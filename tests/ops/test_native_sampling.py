"""The native sampler against the torch one: the same tokens for every kind of logits, however they are sliced and spread."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from batchinfer.ops.draw import SamplingColumns
from batchinfer.ops.rows import Product, ScaledRows, to_dense
from batchinfer.runtime.noise import row_keys
from tests.engine.draws import NATIVE, exact_noise, kept_by_sorting, put, sampler

pytestmark = pytest.mark.skipif(NATIVE.library is None, reason=NATIVE.reason)
ROWS = 40


def asked(vocab: int, seed: int) -> SamplingColumns:
    """A mixture of everything that rows ask for."""
    rng = np.random.default_rng(seed)
    choose = lambda options, dtype: rng.choice(options, ROWS).astype(dtype)  # noqa: E731
    return SamplingColumns(
        temperature=choose([0.0, 1e-4, 0.3, 1.0, 1.0, 5.0, 1e20], np.float32),
        top_k=np.minimum(choose([1, 2, 40, 1500, vocab, vocab, vocab], np.int32), vocab).astype(np.int32),
        top_p=choose([0.05, 0.9, 0.999, 0.99999994, 1.0, 1.0, 1.0], np.float32),
        min_p=choose([0.0, 0.0, 0.0, 0.02, 0.5], np.float32),
        keys=row_keys(rng.integers(0, 2**63, ROWS).astype(np.uint64), np.arange(ROWS)),
    )


def products(vocab: int, seed: int) -> dict[str, Product]:
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(ROWS, vocab, generator=g) * torch.rand(ROWS, 1, generator=g) * 6
    values[::5] = values[::5].round()  # ties
    values[3, : vocab // 2] = -torch.inf
    values[7] = 1.5
    scale = torch.rand(ROWS, generator=g) * 0.1 + 1e-3
    scale[11] = 0.0
    return {"float32": values, "bf16": values.bfloat16(), "scaled": ScaledRows(values.nan_to_num(neginf=-1e4) * 20, scale, None)}


def check_same(logits: Product, columns: SamplingColumns, got: np.ndarray, expected: np.ndarray) -> None:
    """Tokens are equal, but where two candidates lie within rounding of each other, or of where a filter cuts."""
    dense = to_dense(logits, torch.float32).float().numpy()
    vocab = dense.shape[1]
    for row in np.flatnonzero(got != expected):
        temperature = columns.temperature[row]
        assert temperature > 0, row
        scaled = dense[row] / temperature
        noisy = scaled + exact_noise(columns.keys[row : row + 1], vocab)[0]
        rounding = 1e-5 + 3e-7 * abs(scaled.max())
        if abs(noisy[got[row]] - noisy[expected[row]]) < rounding:
            continue
        top_k, top_p, min_p = int(columns.top_k[row]), float(columns.top_p[row]), float(columns.min_p[row])
        sets = [set(kept_by_sorting(scaled, top_k, top_p * (1 + e), min_p * (1 + e)).tolist()) for e in (-1e-5, 1e-5)]
        assert got[row] in sets[0] | sets[1], row
        assert sets[0] != sets[1], row


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 100, 1000, 5003])
@pytest.mark.parametrize("name", ["float32", "bf16", "scaled"])
def test_tokens_are_those_of_the_torch_sampler(vocab: int, name: str) -> None:
    for seed in range(3):
        logits, columns = products(vocab, seed)[name], asked(vocab, seed)
        widths = [vocab // 3, vocab // 2] if vocab > 40 else []
        got, expected = put(sampler("native", vocab), logits, columns, widths), put(sampler("torch", vocab), logits, columns, widths)
        assert np.array_equal(got.sound, expected.sound)
        sound = np.flatnonzero(got.sound)
        part = SamplingColumns(*(getattr(columns, field)[sound] for field in columns.__dataclass_fields__))
        check_same(to_dense(logits, torch.float32)[sound], part, got.token_ids[sound], expected.token_ids[sound])


@pytest.mark.parametrize("name", ["float32", "bf16", "scaled"])
def test_slices_and_threads_change_no_token(name: str) -> None:
    vocab = 7000
    logits, columns = products(vocab, 9)[name], asked(vocab, 9)
    native = sampler("native", vocab)
    expected = put(native, logits, columns).token_ids
    for widths in ([1], [64] * 20, [4096], [6999], [1000, 13, 2048]):
        assert np.array_equal(put(native, logits, columns, widths).token_ids, expected), widths
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert np.array_equal(put(native, logits, columns, [4096]).token_ids, expected), count
    finally:
        torch.set_num_threads(threads)


def test_no_draw_is_ruled_out_too_early() -> None:
    """Noise is made only where it could win; the token is still the one that all noise gives."""
    vocab, rows = 3000, 600
    g = torch.Generator().manual_seed(6)
    logits = torch.randn(rows, vocab, generator=g) * torch.linspace(0.2, 6, rows)[:, None]
    keys = row_keys(np.full(rows, 77, np.uint64), np.arange(rows))
    of = [np.full(rows, value, dtype) for value, dtype in ((0.9, np.float32), (vocab, np.int32), (1.0, np.float32), (0.0, np.float32))]
    got = put(sampler("native", vocab), logits, SamplingColumns(*of, keys), [1024, 1024]).token_ids
    noisy = logits.numpy() / np.float32(0.9) + exact_noise(keys, vocab)
    assert (noisy.max(1) - noisy[np.arange(rows), got]).max() < 1e-5


def test_top_p_just_below_1_keeps_all_whatever_the_sums_round_to() -> None:
    """The mass that top-p asks for may come out larger than the sum of all there is."""
    vocab, rows = 1000, 400
    rng = np.random.default_rng(0)
    logits = np.repeat(-rng.uniform(0, 3, (rows, 1)).astype(np.float32), vocab, 1)
    logits[:, 500], logits[:, 0] = 0.0, -9.0
    of = [
        np.full(rows, value, dtype)
        for value, dtype in ((1.0, np.float32), (vocab, np.int32), (1 - 2.0**-24, np.float32), (0.0, np.float32))
    ]
    drawn = put(
        sampler("native", vocab), torch.from_numpy(logits), SamplingColumns(*of, row_keys(np.zeros(rows, np.uint64), np.arange(rows)))
    )
    assert (drawn.token_ids == 0).sum() <= 2  # it weighs less than 1 in 5,000


def test_rows_may_lie_apart_in_memory() -> None:
    vocab, columns = 300, asked(300, 4)
    wide = products(512, 4)["float32"]
    assert isinstance(wide, Tensor)
    native = sampler("native", vocab)
    draw = native.begin(columns)
    draw.take(0, wide[:, 100:400])
    assert np.array_equal(draw.finish().token_ids, put(native, wide[:, 100:400].contiguous(), columns).token_ids)


def test_the_memory_of_kept_logits_serves_step_after_step() -> None:
    """A later step with fewer rows that filter sees nothing of an earlier one."""
    vocab = 900
    native = sampler("native", vocab)
    for seed in (1, 2, 3):
        logits, columns = products(vocab, seed)["float32"], asked(vocab, seed)
        fresh = put(sampler("native", vocab), logits, columns).token_ids
        assert np.array_equal(put(native, logits, columns).token_ids, fresh)
