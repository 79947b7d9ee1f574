"""Products at numbers of rows that agree: the cuts, and that a library which sums otherwise at some sizes is found out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batchinfer.layers.row_sizes import FEW_ROWS, MOST_ROWS, STEP, cancelling, row_sizes
from batchinfer.ops.row_sizes import in_row_sizes, pieces

SHAPE = (24, 80)


@given(st.integers(0, 700), st.sets(st.integers(1, 200), min_size=1))
def test_pieces_cover_every_row_once_in_agreeing_sizes(rows: int, some: set[int]) -> None:
    sizes = tuple(sorted(some))
    cut = pieces(rows, sizes)
    assert [row for start, end, _ in cut for row in range(start, end)] == list(range(rows))
    assert all(size in sizes and end - start <= size for start, end, size in cut)


def backwards(rows: int) -> bool:
    """Whether the library below adds the other way round."""
    return rows < 48 or 200 <= rows < 300


def moody(weight: Tensor, x: Tensor) -> Tensor:
    """x W^T, summed one input after the other, from the other end at some numbers of rows."""
    total = torch.zeros(len(x), len(weight))
    inputs = range(x.shape[1])
    for i in reversed(inputs) if backwards(len(x)) else inputs:
        total += x[:, i, None] * weight[None, :, i]
    return total


def with_moods(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return partial(moody, weight)


def steady(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.stack([(row[None] * weight).sum(1) for row in x])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHINFER_CACHE", str(tmp_path))


def test_sizes_at_which_a_library_sums_otherwise_are_left_out() -> None:
    sizes = row_sizes("moody", with_moods, SHAPE, torch.float32).value
    assert sizes == tuple(size for size in range(STEP, MOST_ROWS + 1, STEP) if not backwards(size))
    weight, x = cancelling(SHAPE, MOST_ROWS)
    whole = in_row_sizes(with_moods(weight), sizes, x)
    assert not torch.equal(moody(weight, x[:5]), whole[:5])  # else the next line proves nothing
    assert all(torch.equal(in_row_sizes(with_moods(weight), sizes, x[:rows]), whole[:rows]) for rows in FEW_ROWS)


def test_a_library_that_always_sums_alike_is_left_alone() -> None:
    assert row_sizes("steady", steady, SHAPE, torch.float32).value == ()


def test_what_cancels_shows_another_order_where_rounding_would_hide_it() -> None:
    weight, x = cancelling(SHAPE, 1)
    assert (x.double() @ weight.double().T).abs().max() == 0
    plain = torch.randn(1, SHAPE[1], generator=torch.Generator().manual_seed(0))
    assert _shown(weight, x) > 0.3
    assert _shown(weight, plain) < 0.05


def _shown(weight: Tensor, x: Tensor) -> float:
    """The share of outputs in bf16 that tell the two orders apart."""
    forward, backward = moody(weight, x.expand(64, -1))[:1], moody(weight, x)
    return float((forward.bfloat16() != backward.bfloat16()).float().mean())
