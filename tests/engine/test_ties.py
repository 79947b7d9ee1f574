"""Greedy rows in bf16: tokens whose rounded logits are equal are told apart by the logits before they were rounded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from batchinfer.core.request import SamplingParams
from batchinfer.layers.kinds import LinearKind
from batchinfer.layers.linear import pack_dense
from batchinfer.layers.lm_head import LmHead
from batchinfer.layers.tiles import pack_tile_bf16
from batchinfer.ops.draw import MOST_TIES
from batchinfer.ops.table import REFERENCE
from tests.engine.draws import KINDS, columns, put, sampler
from tests.engine.test_head import EOS, HIDDEN, KNOWN, linear_kind, weights, world

kinds = pytest.mark.parametrize("kind", KINDS)
ROWS = 48
DENSE_BF16 = LinearKind("none", "plain", torch.bfloat16, pack_dense, pack_dense)
TILES = LinearKind("none", "plain", torch.bfloat16, pack_tile_bf16, pack_tile_bf16)


def states(seed: int = 1) -> Tensor:
    """Hidden states bf16 whose largest logits lie far from 0, where bf16 numbers lie far apart."""
    return (torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(seed)) * 4).bfloat16()


def close_weights() -> Tensor:
    """[V, H] bf16 in families of tokens, over the whole vocabulary, that hardly differ."""
    g = torch.Generator().manual_seed(7)
    family = torch.randint(0, 400, (len(weights()),), generator=g)
    return (weights()[family] + 2e-3 * torch.randn(len(family), HIDDEN, generator=g)).bfloat16()


def head_of(layout: str, tied: bool) -> LmHead:
    weight = close_weights()
    kind = {"onednn": lambda: linear_kind("bf16"), "tiles": lambda: TILES, "dense": lambda: DENSE_BF16}[layout]()
    return LmHead(weight, kind, REFERENCE, weight if tied else None)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().T


@kinds
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", ["onednn", "tiles", "dense"])
def test_ties_are_settled_as_unrounded_logits_would(kind: str, layout: str, tied: bool) -> None:
    head = head_of(layout, tied)
    x, weight = states(), close_weights()
    logits = head.logits(x)[:, :KNOWN]
    shared = logits == logits.amax(1, keepdim=True)
    assert (shared.sum(1) > 1).sum() > ROWS // 3, "too few ties to prove anything"
    got = torch.from_numpy(world(kind, [SamplingParams()] * ROWS, of=head).decide(x).token_ids).long()
    true = exact(x, weight)[:, :KNOWN].masked_fill(~shared, -torch.inf)
    few = shared.sum(1) <= MOST_TIES
    lost = true.amax(1) - true.gather(1, got[:, None]).squeeze(1)
    if layout == "onednn" and not tied:
        spacing = 2.0 ** (logits.amax(1).log2().floor() - 7)
        assert (lost <= spacing / 128)[few].all(), "8 more bits than bf16 has"
        assert (lost[few] == 0).sum() > 0.9 * few.sum()
    else:
        assert not lost[few].any()
    assert shared[torch.arange(ROWS), got].all()
    assert (got != shared.int().argmax(1)).any(), "always the lowest id"


@kinds
def test_a_settled_tie_is_the_rows_own_affair(kind: str) -> None:
    """Neither how many rows there are, nor which of them ban tokens, nor which are sampled, changes a greedy row's token."""
    x, head = states(), head_of("onednn", tied=False)
    together = world(kind, [SamplingParams()] * ROWS, of=head).decide(x).token_ids
    w = world(kind, [SamplingParams()] * ROWS, of=head)
    for rows in (slice(0, 1), slice(5, 8), slice(9, 48)):
        assert np.array_equal(w.decide(x[rows].clone(), w.slots[rows]).token_ids, together[rows])
    odd = [SamplingParams(min_tokens=2, stop_token_ids=(1, 7000, 19_000)), SamplingParams(temperature=1.0), SamplingParams()]
    others = world(kind, [odd[i % 3] for i in range(ROWS)], of=head).decide(x).token_ids
    assert np.array_equal(others[2::3], together[2::3])


@kinds
def test_banned_and_unknown_tokens_win_no_tie(kind: str) -> None:
    weight = torch.zeros(len(weights()), HIDDEN, dtype=torch.bfloat16)
    weight[[50, EOS, 9000, KNOWN], 0] = 20.0
    weight[[50, EOS, 9000, KNOWN], 1] = torch.tensor([0.01, 0.04, 0.02, 0.05], dtype=torch.bfloat16)
    x = torch.zeros(2, HIDDEN, dtype=torch.bfloat16)
    x[:, :2] = 1.0
    head = LmHead(weight, linear_kind("bf16"), REFERENCE)
    assert world(kind, [SamplingParams(), SamplingParams(min_tokens=2)], of=head).decide(x).token_ids.tolist() == [EOS, 9000]


def test_both_samplers_find_the_same_ties() -> None:
    """Also where they are too many to be told, are spread over slices, or lie in rows that are broken or not greedy."""
    vocab, rows = 3000, 60
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, vocab, generator=g).mul(2).bfloat16()
    logits[::4] = logits[::4].float().round().bfloat16()
    logits[1], logits[5, 100:] = 1.5, -torch.inf
    logits[2, 7], logits[3] = torch.nan, -torch.inf
    asked = columns(rows, vocab=vocab, temperature=0.0)
    asked.temperature[6::7] = 0.8
    found = [put(sampler(kind, vocab), logits, asked, widths, rounded=True) for kind in KINDS for widths in ((), (1000, 1000), (33,))]
    for drawn in found:
        assert np.array_equal(drawn.ties.rows, found[0].ties.rows)
        assert np.array_equal(drawn.ties.token_ids, found[0].ties.token_ids)
    dense = logits.float().numpy()
    expected = []
    for row in range(rows):
        same = np.flatnonzero(dense[row] == dense[row].max())
        if asked.temperature[row] == 0 and np.isfinite(dense[row].max()) and len(same) > 1:
            expected += [(row, token_id) for token_id in same[:MOST_TIES].tolist()]
    assert list(zip(found[0].ties.rows.tolist(), found[0].ties.token_ids.tolist(), strict=True)) == expected
    plain = put(sampler("torch", vocab), logits, asked)
    assert not len(plain.ties.rows), "ties of exact logits are real"
    assert np.array_equal(plain.token_ids[found[0].sound], found[0].token_ids[found[0].sound])
