"""What the user asked (`SamplingParams`, `Request`) and what comes back (`Result`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

import numpy as np

from batchinfer.core.structure import STRUCTURE_NAMES, Structure, parse_structure, structure_asked
from batchinfer.core.token_logprobs import TokenLogprobs
from batchinfer.errors import InputError

GREEDY_EPSILON = 1e-5  # temperatures below are greedy: dividing by less only adds rounding
MAX_STOP_STRINGS = 64
MAX_COUNT = 2**31 - 1  # what a column of counts holds
MAX_TEMPERATURE = 1e30  # uniform long before; float32 overflows at 3.4e38
MAX_STOP_LENGTH = 4096
MAX_REPETITION = 1024
MAX_BAD_WORDS = 1024
MAX_BIASES = 1024  # token ids in a row's `logit_bias`
MOST_BIAS = 100.0  # OpenAI's bounds: 100 all but forces a token, -100 all but bans it
MAX_PENALTY = 1e6
MAX_CHOICES = 128  # of a row
MAX_LOGPROBS = 100  # alternatives told of a token


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

    `repetition_penalty` looks at prompt and answer, `presence_penalty` and `frequency_penalty` at the answer alone.
    `logit_bias` are pairs of token id and what is added to its logit. `logprobs` and `prompt_logprobs` are how many
    alternatives are told beside each token of answer and prompt; None tells nothing.
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
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: Structure | None = None

    def __post_init__(self) -> None:
        """Take one stop string, lists, and a mapping of biases, as they are commonly written."""
        if isinstance(self.stop, str | list):
            object.__setattr__(self, "stop", _strings("stop", self.stop))
        if isinstance(self.stop_token_ids, list):
            object.__setattr__(self, "stop_token_ids", _integers("stop_token_ids", self.stop_token_ids))
        if isinstance(self.bad_words, str | list):
            object.__setattr__(self, "bad_words", _strings("bad_words", self.bad_words))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", _biases("logit_bias", self.logit_bias))
        if isinstance(self.structured_outputs, Mapping):
            object.__setattr__(self, "structured_outputs", parse_structure("structured_outputs", self.structured_outputs))

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken without noise."""
        return self.temperature < GREEDY_EPSILON

    def check(self) -> SamplingParams:
        """Return self if every value has its type and range, else raise `InputError` naming the parameter and the value."""
        for name, parse in PARSERS.items():
            value = getattr(self, name)
            if value is not None or name not in MAY_BE_NONE:
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
        return self._wishes_in_range()

    def _wishes_in_range(self) -> SamplingParams:
        most = MAX_PENALTY
        _require(
            1 / most <= self.repetition_penalty <= most, "repetition_penalty", self.repetition_penalty, f"above 0, to {most:g} (1 is off)"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "from -2 to 2 (0 is off)")
        _require(len(self.logit_bias) <= MAX_BIASES, "logit_bias", f"{len(self.logit_bias)} tokens", f"at most {MAX_BIASES:,} tokens")
        for token_id, _ in self.logit_bias:
            _require(token_id >= 0, "logit_bias", token_id, "token ids of at least 0")
        _require(len(self.bad_words) <= MAX_BAD_WORDS, "bad_words", f"{len(self.bad_words)} words", f"at most {MAX_BAD_WORDS:,} words")
        for word in self.bad_words:
            good = 0 < len(word) <= MAX_STOP_LENGTH and not any("\ud800" <= c <= "\udfff" for c in word)
            _require(good, "bad_words", word[:40], f"Unicode texts of 1 to {MAX_STOP_LENGTH} characters")
        _require(1 <= self.n <= MAX_CHOICES, "n", self.n, f"from 1 to {MAX_CHOICES}")
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(self, name)
            _require(asked is None or 0 <= asked <= MAX_LOGPROBS, name, asked, f"from 0 (the token alone) to {MAX_LOGPROBS}")
        return self

    def updated(self, values: Mapping[str, Any]) -> SamplingParams:
        """Return a copy with `values` laid over it, type-checked and in range.

        Keys are parameter names or their aliases; None means "not given". Raises `InputError` that names the
        parameter for a wrong type, a value out of range, an unknown name, or a parameter this version cannot honour.
        """
        given: dict[str, Any] = {}
        beside: dict[str, Any] = {}
        wishes: dict[str, Any] = {}
        for key, value in values.items():
            if value is None:
                continue
            name = ALIASES.get(key, key)
            if name in STRUCTURE_NAMES:
                wishes[name] = value
            elif name in BESIDE:
                beside[name] = value
            elif name in PARSERS:
                if name in given and name != key:
                    continue  # the parameter's own name wins over an alias beside it
                given[name] = PARSERS[name](key, value)
            else:
                raise InputError(f"unknown parameter {key!r}; known: {', '.join(sorted(PARAMETER_NAMES))}", "unknown_parameter")
        if "top_logprobs" in beside:
            given["logprobs"] = _with_alternatives(values.get("logprobs"), beside["top_logprobs"], given.get("logprobs", self.logprobs))
        if wishes:
            given["structured_outputs"] = structure_asked(wishes)
        params = replace(self, **given)._in_range() if given else self
        if "best_of" in beside and _integer("best_of", beside["best_of"]) != params.n:
            raise InputError(
                f"best_of={_show(beside['best_of'])} is not supported: every choice is given, so it can only equal n ({params.n})",
                "unsupported_parameter",
            )
        return params


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


def _biases(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """Token ids, as JSON writes keys too, to amounts; a table's rows name every token of all rows, most with null."""
    if isinstance(value, list | tuple):  # an Arrow map, or what was parsed before
        if not all(isinstance(item, list | tuple) and len(item) == 2 for item in value):
            raise _wrong_type(name, value, "an object of token ids and numbers")
        value = dict(value)
    if not isinstance(value, Mapping):
        raise _wrong_type(name, value, "an object of token ids and numbers")
    found: dict[int, float] = {}
    for key, amount in value.items():
        token_id = key
        if isinstance(key, str):
            if not (key.isascii() and key.isdecimal() and len(key) <= 10):
                raise _wrong_type(f"{name}'s key", key, "a token id")
            token_id = int(key)
        if amount is not None:
            bias = _number(name, amount)
            if bias != bias:
                raise _wrong_type(name, amount, "a number")
            found[_integer(f"{name}'s key", token_id)] = min(MOST_BIAS, max(-MOST_BIAS, bias))
    return tuple(found.items())


def _alternatives(name: str, value: object) -> int | None:
    """True tells of the token alone, a number also of so many alternatives, false of nothing."""
    if isinstance(value, bool):
        return 0 if value else None
    return _integer(name, value)


def _with_alternatives(asked: object, top: object, logprobs: int | None) -> int | None:
    """OpenAI's chat bodies say whether in `logprobs` and how many in `top_logprobs`."""
    count = _integer("top_logprobs", top)
    _require(0 <= count <= MAX_LOGPROBS, "top_logprobs", count, f"from 0 to {MAX_LOGPROBS}")
    if count and asked is False:
        raise InputError(f"top_logprobs={count} with logprobs=false: ask for logprobs, or leave top_logprobs out", "invalid_parameter")
    if asked is None or isinstance(asked, bool):
        return count if count else logprobs
    if count and count != logprobs:
        raise InputError(f"logprobs={asked} and top_logprobs={count} say two things; give one of them", "invalid_parameter")
    return logprobs


PARSERS: dict[str, Callable[[str, Any], Any]] = {
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
    "repetition_penalty": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "logit_bias": _biases,
    "bad_words": _strings,
    "n": _integer,
    "logprobs": _alternatives,
    "prompt_logprobs": _alternatives,
    "structured_outputs": parse_structure,
}
assert set(PARSERS) == {f.name for f in fields(SamplingParams)}

ALIASES = {"max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens"}


MAY_BE_NONE = frozenset({"seed", "logprobs", "prompt_logprobs", "structured_outputs"})
BESIDE = frozenset({"top_logprobs", "best_of"})  # say something of another parameter
PARAMETER_NAMES = frozenset(PARSERS) | frozenset(ALIASES) | BESIDE | STRUCTURE_NAMES


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


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One of several answers to a row."""

    text: str
    finish_reason: FinishReason
    token_ids: np.ndarray
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True, eq=False)
class Result:
    """One row's outcome: generated text and its accounting, or an error. Of several answers, the first, and all in `choices`."""

    row: int
    text: str = ""
    finish_reason: FinishReason = FinishReason.ERROR
    token_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # generated ids, stop token included
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache at first admission
    num_preemptions: int = 0
    clipped: bool = False  # `length` because context or pool were smaller than the row's max_tokens
    error: RowError | None = None
    logprobs: TokenLogprobs | None = None  # of `token_ids`, where they were asked for
    prompt_logprobs: TokenLogprobs | None = None  # of the prompt's tokens; the first has none
    prompt_ids: np.ndarray | None = None  # beside `prompt_logprobs`
    choices: tuple[Choice, ...] = ()  # all answers, where the row asked for several

    @property
    def num_generated_tokens(self) -> int:
        """Of all answers."""
        return sum(len(choice.token_ids) for choice in self.choices) if self.choices else len(self.token_ids)

    @classmethod
    def failed(cls, row: int, error: InputError, num_prompt_tokens: int = 0) -> Result:
        """A row that ends with an error record."""
        return cls(row, error=RowError.of(error), num_prompt_tokens=num_prompt_tokens)


def structure_of(item: Request | Result) -> Structure | None:
    """What the row's answer must look like; a failed row has none."""
    return item.params.structured_outputs if isinstance(item, Request) else None
