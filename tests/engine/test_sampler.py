"""The sampler: distributions, filters, and that a row's draw is its own affair."""

from __future__ import annotations

import math

import numpy as np
import torch

from batchinfer.runtime.noise import gumbel, row_keys
from batchinfer.runtime.sampler import SamplingColumns, sample


def columns(
    rows: int, *, temperature: float = 1.0, top_p: float = 1.0, min_p: float = 0.0, top_k: int | None = None, vocab: int = 8, first: int = 0
) -> SamplingColumns:
    def full(value: float) -> torch.Tensor:
        return torch.full((rows, 1), value)

    keys = row_keys(np.full(rows, 1234, np.uint64), np.arange(first, first + rows))
    k = torch.full((rows, 1), vocab if top_k is None else top_k, dtype=torch.int64)
    return SamplingColumns(full(temperature), full(top_p), full(min_p), k, torch.from_numpy(keys))


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -0.5, 0.3])
    n = 40_000
    for temperature in (0.7, 1.0, 1.8):
        drawn = sample(logits.expand(n, -1), columns(n, temperature=temperature))
        counts = np.bincount(drawn.numpy(), minlength=8)
        expected = torch.softmax(logits / temperature, -1).numpy() * n
        assert chi_square(counts, expected) < 24.3  # 7 degrees of freedom, p = 0.001


def test_noise_of_neighbouring_seeds_positions_and_tokens_is_unrelated() -> None:
    tokens = torch.arange(2000, dtype=torch.int32)
    keys = torch.from_numpy(row_keys(np.array([5, 5, 6, 2**63], np.uint64), np.array([9, 10, 9, 9])))
    noise = gumbel(keys, tokens)
    assert torch.isfinite(noise).all()
    correlation = np.corrcoef(noise.numpy())
    assert np.abs(correlation - np.eye(4)).max() < 0.08
    assert abs(float(noise.mean()) - 0.5772) < 0.05
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.1


def test_filters_keep_what_they_say() -> None:
    logits = torch.log(torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005]))
    n = 20_000
    cases = [
        ({"top_k": 3}, [0.5, 0.3125, 0.1875]),
        ({"top_p": 0.6}, [0.4 / 0.65, 0.25 / 0.65]),  # the token that crosses 0.6 stays
        ({"top_p": 1e-6}, [1.0]),
        ({"min_p": 0.3}, [0.5, 0.3125, 0.1875]),
        ({"top_k": 3, "top_p": 0.45}, [1.0]),  # top-p counts within what top-k kept, where the first has 0.5
        ({"top_k": 1}, [1.0]),
    ]
    for options, kept in cases:
        counts = np.bincount(sample(logits.expand(n, -1), columns(n, **options)).numpy(), minlength=8)
        assert counts[len(kept) :].sum() == 0, options
        assert chi_square(counts[: len(kept)], np.array(kept) * n) < 16.3, options


def test_combined_filters_equal_the_whole_sort() -> None:
    from batchinfer.runtime import sampler

    torch.manual_seed(2)
    vocab = 3000
    logits = torch.randn(64, vocab)
    probabilities = torch.softmax(logits, -1)
    for top_k in (1, 1023, 1024, 1025, 2000, vocab):
        for top_p in (0.3, 0.9, 0.9999, 1.0):
            for min_p in (0.0, 0.01):
                cols = columns(64, top_k=top_k, top_p=top_p, min_p=min_p, vocab=vocab)
                whole = sampler._choose(*sampler._sorted(logits, probabilities), cols)
                assert torch.equal(sample(logits, cols), whole), (top_k, top_p, min_p)


def test_a_row_draws_the_same_alone_and_in_company() -> None:
    torch.manual_seed(0)
    vocab = 5000  # more than the candidates looked at first
    logits = torch.randn(24, vocab) * 3
    logits[5] = logits[5].round()  # ties
    for options in ({}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}, {"top_p": 0.9999}, {"top_k": 3000}):
        together = sample(logits, columns(24, vocab=vocab, **options))
        for row in (0, 5, 23):
            alone = sample(logits[row : row + 1], columns(1, vocab=vocab, first=row, **options))
            assert int(alone) == int(together[row]), options


def test_wide_filters_equal_the_whole_sort() -> None:
    """Looking at the most likely candidates first changes nothing."""
    from batchinfer.runtime import sampler

    torch.manual_seed(1)
    logits = torch.randn(16, 4000) * 2
    cols = columns(16, top_p=0.8, vocab=4000)
    few = sample(logits, cols)
    probabilities = torch.softmax(logits, -1)
    everything = sampler._choose(*sampler._sorted(logits, probabilities), cols)
    assert torch.equal(few, everything)


def test_a_very_hot_row_is_uniform_and_keeps_bans() -> None:
    logits = torch.randn(4000, 8) * 5
    logits[:, 3] = -torch.inf
    drawn = np.bincount(sample(logits, columns(4000, temperature=1e30)).numpy(), minlength=8)
    assert drawn[3] == 0
    assert chi_square(np.delete(drawn, 3), np.full(7, 4000 / 7)) < 22.5  # 6 degrees of freedom, p = 0.001
