"""What the user asked (`SamplingParams`, `Request`) and what comes back (`Result`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

import numpy as np

from batchinfer.errors import InputError

GREEDY_EPSILON = 1e-5  # temperatures below are greedy: dividing by less only adds rounding
MAX_STOP_STRINGS = 64
MAX_COUNT = 2**31 - 1  # what a column of counts holds
MAX_TEMPERATURE = 1e30  # uniform long before; float32 overflows at 3.4e38
MAX_STOP_LENGTH = 4096
MAX_REPETITION = 1024


class FinishReason(StrEnum):
    """Why a row ended."""

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one row is sampled. Immutable; shared between rows that ask for the same.

    `seed` None means: derived from the job seed and the row's position. `max_tokens` is clipped to the context and
    the KV pool, and the row then ends with `length`. `top_k` 0 and -1, `top_p` 1, `min_p` 0 are off.
    """

    max_tokens: int = 512
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stop_repetition: int = 0  # 0: off

    def __post_init__(self) -> None:
        """Take one stop string, or lists, as they are commonly written."""
        if isinstance(self.stop, str | list):
            object.__setattr__(self, "stop", _strings("stop", self.stop))
        if isinstance(self.stop_token_ids, list):
            object.__setattr__(self, "stop_token_ids", _integers("stop_token_ids", self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken without noise."""
        return self.temperature < GREEDY_EPSILON

    def check(self) -> SamplingParams:
        """Return self if every value has its type and range, else raise `InputError` naming the parameter and the value."""
        for name, parse in PARSERS.items():
            value = getattr(self, name)
            if value is not None or name != "seed":
                parse(name, value)
        return self._in_range()

    def _in_range(self) -> SamplingParams:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(0 <= self.min_tokens <= MAX_COUNT, "min_tokens", self.min_tokens, f"from 0 to {MAX_COUNT:,}")
        _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        _require(0 <= self.temperature <= MAX_TEMPERATURE, "temperature", self.temperature, f"from 0 (greedy) to {MAX_TEMPERATURE:g}")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1 (1 is off)")
        _require(-1 <= self.top_k <= MAX_COUNT, "top_k", self.top_k, f"from 1 to {MAX_COUNT:,}, or 0 or -1 for off")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        _require(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", self.seed, "an integer of at most 64 bits")
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS} strings")
        allowed = f"from 3 to {MAX_REPETITION:,}, or 0 for off"
        _require(self.stop_repetition == 0 or 3 <= self.stop_repetition <= MAX_REPETITION, "stop_repetition", self.stop_repetition, allowed)
        for text in self.stop:
            _require(0 < len(text) <= MAX_STOP_LENGTH, "stop", text[:40], f"strings of 1 to {MAX_STOP_LENGTH} characters")
        for token_id in self.stop_token_ids:
            _require(token_id >= 0, "stop_token_ids", token_id, "token ids of at least 0")
        return self

    def updated(self, values: Mapping[str, Any]) -> SamplingParams:
        """Return a copy with `values` laid over it, type-checked and in range.

        Keys are parameter names or their aliases; None means "not given". Raises `InputError` that names the
        parameter for a wrong type, a value out of range, an unknown name, or a parameter this version cannot honour.
        """
        given: dict[str, Any] = {}
        for key, value in values.items():
            if value is None:
                continue
            name = ALIASES.get(key, key)
            if name in PARSERS:
                if name in given and name != key:
                    continue  # the parameter's own name wins over an alias beside it
                given[name] = PARSERS[name](key, value)
            elif name in NOT_YET:
                if not NOT_YET[name](value):
                    raise InputError(
                        f"{key}={_show(value)} is not supported by this version; remove it from the row", "unsupported_parameter"
                    )
            else:
                raise InputError(f"unknown parameter {key!r}; known: {', '.join(sorted(PARAMETER_NAMES))}", "unknown_parameter")
        return replace(self, **given)._in_range() if given else self


def _require(good: bool, name: str, value: object, allowed: str) -> None:
    if not good:
        raise InputError(f"{name}={_show(value)} is out of range; must be {allowed}", "invalid_parameter")


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _wrong_type(name: str, value: object, wanted: str) -> InputError:
    return InputError(f"{name} must be {wanted}, got {_show(value)} ({type(value).__name__})", "invalid_parameter")


def _integer(name: str, value: object) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)  # data frames turn a column with gaps into floats
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_type(name, value, "an integer")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong_type(name, value, "a number")
    try:
        return float(value)
    except OverflowError:
        raise _wrong_type(name, value, "a number within float range") from None


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong_type(name, value, "true or false")
    return value


def _strings(name: str, value: object) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise _wrong_type(name, value, "a string or a list of strings")
    return tuple(items)


def _integers(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise _wrong_type(name, value, "a list of integers")
    return tuple(_integer(name, item) for item in value)


PARSERS = {
    "max_tokens": _integer,
    "min_tokens": _integer,
    "temperature": _number,
    "top_p": _number,
    "top_k": _integer,
    "min_p": _number,
    "seed": _integer,
    "stop": _strings,
    "stop_token_ids": _integers,
    "include_stop_str_in_output": _boolean,
    "ignore_eos": _boolean,
    "skip_special_tokens": _boolean,
    "stop_repetition": _integer,
}
assert set(PARSERS) == {f.name for f in fields(SamplingParams)}

ALIASES = {"max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens"}

# Parameters of the field that this version cannot honour yet: a value that asks for nothing passes, others are the
# row's error, by name.
NOT_YET: dict[str, Callable[[Any], bool]] = {
    "n": lambda v: v == 1 and not isinstance(v, bool),
    "best_of": lambda v: v == 1 and not isinstance(v, bool),
    "repetition_penalty": lambda v: v == 1,
    "presence_penalty": lambda v: v == 0,
    "frequency_penalty": lambda v: v == 0,
    "logit_bias": lambda v: v == {},
    "logprobs": lambda v: v is False,
    "top_logprobs": lambda v: v == 0,
    "prompt_logprobs": lambda v: v is False,
    "bad_words": lambda v: v == [],
    "response_format": lambda v: isinstance(v, Mapping) and v.get("type") == "text",
    "structured_outputs": lambda v: v == {},
}

PARAMETER_NAMES = frozenset(PARSERS) | frozenset(ALIASES) | frozenset(NOT_YET)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One row for the engine; never changes.

    `row` is the position in the whole input, which orders the output and, where `params.seed` is None, seeds the
    noise. `prompt_ids` is int32 [n], n >= 1, every id below the tokenizer's size.
    """

    row: int
    prompt_ids: np.ndarray
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a row failed: a stable word and a sentence."""

    code: str
    message: str

    @classmethod
    def of(cls, error: InputError) -> RowError:
        """The record of an `InputError`."""
        return cls(error.code, str(error))


@dataclass(slots=True, eq=False)
class Result:
    """One row's outcome: generated text and its accounting, or an error."""

    row: int
    text: str = ""
    finish_reason: FinishReason = FinishReason.ERROR
    token_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # generated ids, stop token included
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache at first admission
    num_preemptions: int = 0
    clipped: bool = False  # `length` because context or pool were smaller than the row's max_tokens
    error: RowError | None = None

    @classmethod
    def failed(cls, row: int, error: InputError, num_prompt_tokens: int = 0) -> Result:
        """A row that ends with an error record."""
        return cls(row, error=RowError.of(error), num_prompt_tokens=num_prompt_tokens)
