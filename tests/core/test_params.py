"""Whatever a row asks for is a set of parameters in range, or an error that names a parameter: never anything else."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.core.request import ALIASES, PARAMETER_NAMES, SamplingParams
from batchinfer.errors import InputError

SCALARS: Any = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=6
)
NEAR: dict[str, Any] = {
    "n": st.integers(-1, 130),
    "best_of": st.integers(0, 4),
    "logprobs": st.booleans() | st.integers(-1, 101),
    "top_logprobs": st.integers(-1, 101),
    "prompt_logprobs": st.booleans() | st.integers(-1, 101),
    "repetition_penalty": st.floats(-1, 3),
    "presence_penalty": st.floats(-3, 3),
    "frequency_penalty": st.integers(-3, 3),
    "logit_bias": st.dictionaries(st.integers(-1, 60_000).map(str) | st.integers(0, 99), st.floats() | st.none(), max_size=4),
    "bad_words": st.lists(st.text(max_size=5), max_size=4),
    "seed": st.integers(-(2**65), 2**65),
    "top_k": st.integers(-3, 2**33),
    "top_p": st.floats(-0.1, 1.1),
    "temperature": st.floats(),
}


@given(st.fixed_dictionaries({}, optional={name: NEAR.get(name, VALUES) | VALUES for name in sorted(PARAMETER_NAMES)}))
@settings(max_examples=400, deadline=None)
def test_parameters_are_in_range_or_named_in_an_error(asked: dict[str, Any]) -> None:
    message = ""
    try:
        params = SamplingParams().updated(asked)
    except InputError as error:
        message = str(error)
    if message:
        assert any(name in message or ALIASES.get(name, name) in message for name in asked), (message, asked)
        return
    assert params.check() is params
    hash(params)
    assert params.updated({}) is params
    assert 1 <= params.n <= 128
    assert all(-100 <= amount <= 100 and token_id >= 0 for token_id, amount in params.logit_bias)
    json.dumps(params.logit_bias, allow_nan=False)


@given(st.fixed_dictionaries({}, optional=NEAR))
@settings(max_examples=200, deadline=None)
def test_what_is_asked_twice_is_the_same(asked: dict[str, Any]) -> None:
    """Rows that ask for the same share their parameters; laying them over themselves changes nothing."""
    try:
        once = SamplingParams().updated(asked)
    except InputError:
        return
    assert once == SamplingParams().updated(dict(reversed(asked.items())))
    assert once.updated(asked) == once
