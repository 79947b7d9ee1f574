"""The samplers: distributions, filters, and that a row's draw is its own affair. Claims hold for torch and native alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from batchinfer.ops.draw import SamplingColumns
from batchinfer.runtime.noise import gumbel, row_keys
from tests.engine.draws import KINDS, columns, exact_noise, kept_by_sorting, put, sampler

kinds = pytest.mark.parametrize("kind", KINDS)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def counts_of(kind: str, logits: torch.Tensor, rows: int, **options: float) -> np.ndarray:
    vocab = logits.shape[-1]
    drawn = put(sampler(kind, vocab), logits.expand(rows, -1), columns(rows, vocab=vocab, **options))  # type: ignore[arg-type]
    assert drawn.sound.all()
    return np.bincount(drawn.token_ids, minlength=vocab)


@kinds
def test_draws_follow_the_softmax(kind: str) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -0.5, 0.3])
    n = 40_000
    for temperature in (0.7, 1.0, 1.8):
        counts = counts_of(kind, logits, n, temperature=temperature)
        expected = torch.softmax(logits / temperature, -1).numpy() * n
        assert chi_square(counts, expected) < 24.3  # 7 degrees of freedom, p = 0.001


@kinds
def test_unlikely_tokens_come_as_often_as_they_should(kind: str) -> None:
    """A long tail of unlikely tokens lives on the largest noise: its share shows how finely that is made."""
    logits = torch.full((20_001,), -13.0)
    logits[0] = 0.0
    n = 4000
    tail = n - int(counts_of(kind, logits, n)[0])
    share = 20_000 * math.exp(-13.0) / (1 + 20_000 * math.exp(-13.0))
    assert abs(tail - n * share) < 4 * math.sqrt(n * share * (1 - share))


def test_noise_of_neighbouring_seeds_positions_and_tokens_is_unrelated() -> None:
    tokens = torch.arange(2000, dtype=torch.int32)
    keys = torch.from_numpy(row_keys(np.array([5, 5, 6, 2**63], np.uint64), np.array([9, 10, 9, 9])))
    noise = gumbel(keys, tokens)
    correlation = np.corrcoef(noise.numpy())
    assert np.abs(correlation - np.eye(4)).max() < 0.08
    assert abs(float(noise.mean()) - 0.5772) < 0.05
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.1
    assert np.allclose(noise.numpy(), exact_noise(keys.numpy(), 2000), rtol=2e-6, atol=2e-6)


def unmixed(h: int) -> int:
    """What murmur3's finaliser makes `h` of."""
    for inverse, shifts in ((0x7ED1B41D, (16,)), (0xA5CB9243, (13, 26)), (1, (16,))):
        out = h
        for shift in shifts:
            out ^= h >> shift
        h = out * inverse % 2**32
    return h


def mixed(h: int) -> int:
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def key_for(h: int, token_id: int, first: int) -> np.ndarray:
    """Keys under which the token's last hash is `h`."""
    second = (unmixed(h) - mixed(token_id * 0x9E3779B9 % 2**32 ^ first)) % 2**32
    return np.array([[first, second]], np.uint32).view(np.int32)


def test_noise_is_finite_for_every_hash() -> None:
    """Also where all bits are ones: float32 rounds them to a whole 1, whose noise would beat every other token."""
    for h in (0, 1, 2**31, 2**32 - 1, 2**32 - 64, 2**32 - 129):
        key = key_for(h, 7, 99)
        noise = float(gumbel(torch.from_numpy(key), torch.tensor([7], dtype=torch.int32)))
        assert -2.9 < noise < 22.2
        assert math.isclose(noise, float(exact_noise(key, 8)[0, 7]), rel_tol=3e-6)


@kinds
def test_a_banned_token_is_not_drawn_under_the_largest_noise(kind: str) -> None:
    for h in (0, 2**32 - 1):
        keys = np.repeat(key_for(h, 3, 5), 2, axis=0)
        asked = columns(2, vocab=6)
        asked = SamplingColumns(asked.temperature, asked.top_k, asked.top_p, asked.min_p, keys)
        logits = torch.zeros(2, 6)
        logits[0, 3] = -torch.inf
        drawn = put(sampler(kind, 6), logits, asked)
        assert drawn.sound.all()
        assert drawn.token_ids[0] != 3
        assert (drawn.token_ids[1] == 3) == (h == 0)
        alone = torch.full((2, 6), -torch.inf)
        alone[:, 3] = 1.0
        for top_k in (6, 1):
            only = SamplingColumns(asked.temperature, np.full(2, top_k, np.int32), asked.top_p, asked.min_p, keys)
            assert put(sampler(kind, 6), alone, only).token_ids.tolist() == [3, 3]


@kinds
def test_filters_keep_what_they_say(kind: str) -> None:
    logits = torch.log(torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005]))
    n = 20_000
    cases = [
        ({"top_k": 3}, [0.5, 0.3125, 0.1875]),
        ({"top_p": 0.6}, [0.4 / 0.65, 0.25 / 0.65]),  # the token that crosses 0.6 stays
        ({"top_p": 1e-6}, [1.0]),
        ({"min_p": 0.3}, [0.5, 0.3125, 0.1875]),
        ({"min_p": 1.0}, [1.0]),
        ({"top_k": 3, "top_p": 0.45}, [1.0]),  # top-p counts within what top-k kept, where the first has 0.5
        ({"top_k": 5, "top_p": 0.95, "min_p": 0.5}, [0.4 / 0.65, 0.25 / 0.65]),
        ({"top_k": 1}, [1.0]),
    ]
    for options, kept in cases:
        counts = counts_of(kind, logits, n, **options)
        assert counts[len(kept) :].sum() == 0, options
        assert chi_square(counts[: len(kept)], np.array(kept) * n) < 16.3, options


ALL_EQUAL = np.zeros(40, np.float32)
ONE_HOT = np.full(60, -1e4, np.float32)
ONE_HOT[17] = 5.0
TIED = np.repeat(np.array([1.0, 3.0, 2.0, 3.0], np.float32), 20)
BANNED = np.where(np.arange(90) % 3 == 0, -np.inf, TIED[np.arange(90) % 80]).astype(np.float32)
CLOSE = (1.0 + np.arange(100) % 7 * 2.0**-23).astype(np.float32)  # neighbouring float32 numbers
TAIL = np.full(1300, np.log(0.2 / 1299), np.float32)  # the unlikely together weigh a fifth of the likeliest
TAIL[1100] = 0.0
SPREAD = (-(10.0 ** (np.arange(300) % 60 - 50.0))).astype(np.float32)  # a thousand powers of ten apart: histograms go deep


@kinds
@pytest.mark.parametrize(
    "values", [ALL_EQUAL, ONE_HOT, TIED, BANNED, CLOSE, TAIL, SPREAD], ids=["equal", "one", "tied", "banned", "close", "tail", "spread"]
)
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1}, {"top_k": 7}, {"top_k": 33}, {"top_k": 10**6}, {"top_p": 1e-9}, {"top_p": 0.5}, {"top_p": 0.37}, {"top_p": 0.9}, {"top_p": 0.999999},
        {"min_p": 0.2}, {"min_p": 1.0}, {"top_k": 30, "top_p": 0.5}, {"top_k": 50, "top_p": 0.9, "min_p": 0.1}, {"top_k": 10, "min_p": 0.5},
    ],
    ids=str,
)  # fmt: skip
def test_the_kept_sets_are_those_of_a_stable_sort(kind: str, values: np.ndarray, options: dict[str, float]) -> None:
    """Among equals the lower ids come first; draws by hot rows show the whole set."""
    n = 3000
    counts = counts_of(kind, torch.from_numpy(values), n, **options)
    kept = kept_by_sorting(
        values, int(min(options.get("top_k", len(values)), len(values))), options.get("top_p", 1.0), options.get("min_p", 0.0)
    )
    assert set(np.flatnonzero(counts)) <= set(kept.tolist())
    expected = np.exp(values[kept] - values[kept].max())
    expected = expected / expected.sum() * n
    first = expected[: len(kept) // 2].sum()
    assert abs(counts[kept[: len(kept) // 2]].sum() - first) <= 5 * math.sqrt(first * (1 - first / n)) + 1e-6
    likely = expected > 15  # a token expected so often is missing once in three million runs
    assert set(kept[likely].tolist()) <= set(np.flatnonzero(counts))


@kinds
@pytest.mark.parametrize("vocab", [3000, 30_000])
def test_draws_equal_those_of_the_whole_sort(kind: str, vocab: int) -> None:
    rng = np.random.default_rng(2)
    rows = 12
    logits = (rng.standard_normal((rows, vocab)) * rng.uniform(0.1, 6, (rows, 1))).astype(np.float32)
    logits[::3] = np.round(logits[::3])  # ties
    for top_k in (0, 1, 1023, 1025, 2500):
        for top_p in (0.3, 0.9, 0.9999, 1.0):
            for min_p in (0.0, 0.01):
                asked = columns(rows, vocab=vocab, top_k=top_k, top_p=top_p, min_p=min_p, temperature=0.8)
                drawn = put(sampler(kind, vocab), torch.from_numpy(logits), asked).token_ids
                scaled = logits / np.float32(0.8)
                noisy = scaled + exact_noise(asked.keys, vocab)
                for row in range(rows):
                    kept = np.sort(kept_by_sorting(scaled[row], top_k or vocab, top_p, min_p))
                    best = kept[noisy[row, kept].argmax()]
                    near = noisy[row, best] - noisy[row, drawn[row]]
                    assert drawn[row] == best or (drawn[row] in kept and near < 1e-5), (top_k, top_p, min_p, row)


@kinds
def test_a_row_draws_the_same_alone_and_in_company(kind: str) -> None:
    torch.manual_seed(0)
    vocab = 5000  # more than the candidates looked at first
    logits = torch.randn(24, vocab) * 3
    logits[5] = logits[5].round()  # ties
    for options in ({}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}, {"top_p": 0.9999}, {"top_k": 3000}):
        together = put(sampler(kind, vocab), logits, columns(24, vocab=vocab, **options), [1024] * 4).token_ids  # type: ignore[arg-type]
        for row in (0, 5, 23):
            asked = columns(1, vocab=vocab, first=row, **options)  # type: ignore[arg-type]
            alone = put(sampler(kind, vocab), logits[row : row + 1], asked, [1024] * 4)
            assert alone.token_ids[0] == together[row], options


@kinds
def test_of_equal_noisy_values_the_lower_id_wins(kind: str) -> None:
    """Beside a large enough logit noise is rounded to whole numbers, and many tokens come out equal."""
    vocab, rows = 9000, 200
    asked = columns(rows, vocab=vocab, temperature=1e-5)
    drawn = put(sampler(kind, vocab), torch.full((rows, vocab), 100.0), asked, [4096, 4096]).token_ids
    scaled = np.float32(100.0) / np.float32(1e-5)
    noisy = scaled + exact_noise(asked.keys, vocab).astype(np.float32)
    assert np.array_equal(drawn, noisy.argmax(1))
    assert ((noisy == noisy.max(1, keepdims=True)).sum(1) > 1).any()


@kinds
def test_a_very_hot_row_is_uniform_and_keeps_bans(kind: str) -> None:
    logits = torch.randn(8, generator=torch.Generator().manual_seed(1)) * 5
    logits[3] = -torch.inf
    for options in ({}, {"top_p": 0.9999}):
        drawn = counts_of(kind, logits, 4000, temperature=1e30, **options)
        assert drawn[3] == 0
        assert chi_square(np.delete(drawn, 3), np.full(7, 4000 / 7)) < 22.5  # 6 degrees of freedom, p = 0.001


@kinds
def test_rows_without_finite_logits_are_told_and_cost_nobody(kind: str) -> None:
    torch.manual_seed(3)
    vocab, bad = 700, {1: torch.nan, 4: torch.inf, 7: -torch.inf}
    clean = torch.randn(10, vocab)
    for options in ({}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5}):
        asked = columns(10, vocab=vocab, **options)  # type: ignore[arg-type]
        expected = put(sampler(kind, vocab), clean, asked, [256, 256])
        for place in (0, 300, 699):
            dirty = clean.clone()
            for row, value in bad.items():
                dirty[row, place] = value
            dirty[7] = -torch.inf
            drawn = put(sampler(kind, vocab), dirty, asked, [256, 256])
            assert np.flatnonzero(~drawn.sound).tolist() == [1, 4, 7]
            assert np.array_equal(drawn.token_ids[drawn.sound], expected.token_ids[drawn.sound])


@kinds
def test_greedy_takes_the_first_of_the_largest_and_no_padding(kind: str) -> None:
    logits = torch.zeros(3, 50)
    logits[0, [11, 30]] = 2.0
    logits[1, [20, 21]] = 2.0
    logits[2, 45] = 9.0  # beyond the vocabulary
    logits[:, 47] = torch.nan
    for options in ({"temperature": 0.0}, {"temperature": 1e-4}, {"top_k": 1}):
        for widths in ((), (16,), (21, 20), (40, 5)):
            drawn = put(sampler(kind, 40), logits, columns(3, vocab=40, **options), widths)  # type: ignore[arg-type]
            assert drawn.sound.all()
            if options != {"temperature": 1e-4}:  # equal logits are drawn from
                assert drawn.token_ids.tolist() == [11, 20, 0]
            assert drawn.token_ids.max() < 40
