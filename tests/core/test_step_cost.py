"""The cost of a step: exact at its points, straight between and beyond them, never falling."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.stats import StepShape
from batchinfer.core.step_cost import StepCost, curve_of

COST = StepCost(
    layers=((1.0, 0.010), (2.0, 0.010), (4.0, 0.014), (8.0, 0.030)),
    head=((1.0, 0.002), (16.0, 0.005)),
    decode_read=1e-6,
    prefill_pair=1e-7,
    constant=0.001,
)


@pytest.mark.parametrize(
    ("tokens", "rows", "context", "pairs", "seconds"),
    [
        (1, 1, 0, 0.0, 0.001 + 0.010 + 0.002),  # a point
        (3, 1, 0, 0.0, 0.001 + 0.012 + 0.002),  # half way between two
        (16, 0, 0, 0.0, 0.001 + 0.062),  # beyond the last: 4 ms a token from there on
        (0, 0, 0, 0.0, 0.001),  # an empty step costs its constant
        (4, 31, 500, 2000.0, 0.001 + 0.014 + 0.008 + 5e-4 + 2e-4),
    ],
)
def test_seconds_by_hand(tokens: int, rows: int, context: int, pairs: float, seconds: float) -> None:
    assert COST.seconds(tokens, rows, context, pairs) == pytest.approx(seconds, rel=1e-12)


def test_arrays_give_what_single_steps_give() -> None:
    tokens, rows = np.arange(1, 40), np.arange(40, 1, -1)
    together = COST.seconds(tokens, rows, 7 * tokens, 0.5 * tokens)
    assert together.shape == (39,)
    assert together.tolist() == [COST.seconds(t, r, 7 * t, 0.5 * t) for t, r in zip(tokens, rows, strict=True)]


def test_a_step_shape_costs_what_its_counts_cost() -> None:
    fields = dict.fromkeys(StepShape.__slots__, 0)
    shape = StepShape(**{**fields, "num_decode": 3, "num_prefill": 5, "num_logits": 4, "decode_context": 90, "prefill_attention": 12.5})
    assert COST.of(shape) == COST.seconds(8, 4, 90, 12.5)


@given(st.dictionaries(st.integers(1, 4096), st.floats(1e-6, 10.0), min_size=1, max_size=12), st.integers(0, 10_000))
def test_more_tokens_never_cost_less(points: dict[int, float], tokens: int) -> None:
    """Measured points may contradict each other; the curve never does, and never lies above a point."""
    cost = StepCost(curve_of(points), curve_of({1: 1.0}), 0.0, 0.0, 0.0)
    assert cost.seconds(tokens, 0) <= cost.seconds(tokens + 1, 0) + 1e-12
    assert all(cost.seconds(count, 0) <= seconds * (1 + 1e-9) for count, seconds in points.items())


def test_of_two_points_that_contradict_each_other_the_faster_counts() -> None:
    assert curve_of({4: 2.0, 1: 5.0, 2: 3.0, 8: 4.0}) == ((1.0, 2.0), (2.0, 2.0), (4.0, 2.0), (8.0, 4.0))
