"""When rows end, and what text they leave."""

from __future__ import annotations

import random

import numpy as np
import pytest

from batchinfer.core.plan import StepResult
from batchinfer.core.request import FinishReason, Request, Result, SamplingParams
from batchinfer.core.stop import TokenSpellings
from batchinfer.core.vocabulary import Vocabulary
from batchinfer.errors import InputError
from tests.fakes import Setup, Span, make_engine, run_checked

WORDS = [b"The", b" capital", b" of", b" France", b" is", b" Paris", b".", b"<eos>", b"\xf0\x9f", b"\x98\x80", b" "]
SPOKEN = Vocabulary(token_bytes=WORDS, special_ids=frozenset({7}), eos_ids=(7,))


class Script:
    """Stands for the model: says fixed tokens, one a step, whatever the prompt."""

    def __init__(self, table: object, says: list[int]) -> None:
        self._table, self._says = table, says

    def decide(self, hidden: object, spans: list[Span]) -> StepResult:
        t = self._table
        slots = [span.slot for span in spans if span.samples]
        said = t.num_tokens[slots] - t.num_prompt[slots]  # type: ignore[attr-defined]
        return StepResult.single(np.array([self._says[int(i)] for i in said], np.int32))


def answer(says: list[int], **params: object) -> Result:
    engine = make_engine(Setup(vocabulary=SPOKEN))
    engine.head = Script(engine.memory.table, [*says, *[6] * 100])  # type: ignore[assignment]
    row = Request(0, np.array([5, 5, 4], np.int32), SamplingParams(**{"max_tokens": 20, **params}).check())  # type: ignore[arg-type]
    return run_checked(engine, [row])[0]


SENTENCE = [0, 1, 2, 3, 4, 5, 6, 7]
TEXT = "The capital of France is Paris."


def test_text_is_the_bytes_of_the_tokens_in_arrays_and_lists() -> None:
    odd = Vocabulary([b"\x00", b"a\x00", b"", b"<s>", b"\xff"], frozenset({3}), (3,))
    for ids, shown, whole in [
        ([0, 1, 2, 3, 4], b"\x00a\x00\xff", b"\x00a\x00<s>\xff"),
        ([], b"", b""),
        ([1, 5, 3, 700], b"a\x00", b"a\x00<s>"),
    ]:
        for some in (ids, np.array(ids, np.int32), tuple(ids)):
            assert odd.text_bytes(some) == shown
            assert odd.text_bytes(some, skip_special_tokens=False) == whole
            assert odd.continuation(some) == shown.decode(errors="replace")


@pytest.mark.parametrize(
    ("params", "text", "count", "reason"),
    [
        ({}, TEXT, 8, "stop"),
        ({"ignore_eos": True, "max_tokens": 9}, TEXT + ".", 9, "length"),
        ({"max_tokens": 7}, TEXT, 7, "length"),
        ({"max_tokens": 8}, TEXT, 8, "stop"),
        ({"stop": ("ance is P",)}, "The capital of Fr", 6, "stop"),
        ({"stop": ("ance is P",), "include_stop_str_in_output": True}, "The capital of France is P", 6, "stop"),
        ({"stop": ("Paris", "is Par")}, "The capital of France ", 6, "stop"),  # the earliest in the text wins
        ({"stop": ("The",)}, "", 1, "stop"),
        ({"stop": ("nowhere",)}, TEXT, 8, "stop"),
        ({"stop": (" Paris is",)}, TEXT, 8, "stop"),  # the prompt ends in " Paris Paris is": never matched
        ({"stop": ("<eos>",)}, TEXT, 8, "stop"),
        ({"stop": ("<eos>",), "ignore_eos": True}, TEXT, 8, "stop"),
        ({"stop_token_ids": (6,)}, TEXT[:-1], 7, "stop"),
        ({"stop_token_ids": (6,), "include_stop_str_in_output": True}, TEXT, 7, "stop"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, TEXT + "<eos>", 8, "stop"),
        ({"stop": ("is",), "min_tokens": 6}, TEXT[: TEXT.index("Paris") + 3], 6, "stop"),  # " is" is too early; "Paris" ends in one
    ],
)
def test_ends(params: dict[str, object], text: str, count: int, reason: str) -> None:
    result = answer(SENTENCE, **params)
    assert (result.text, len(result.token_ids), result.finish_reason) == (text, count, reason)


def test_characters_that_span_tokens() -> None:
    assert answer([8, 9, 7]).text == "😀"
    assert answer([8, 7]).text == "\ufffd"
    assert answer([0, 8, 9, 8, 9, 7], stop=("😀",)).text == "The"
    assert answer([8, 9, 8, 9, 7], stop=("😀😀",)).text == ""


def test_marks_are_exactly_the_tokens_that_can_end_the_string() -> None:
    rng = random.Random(1)
    table = [bytes(rng.choices(b"abc\xff", k=rng.randrange(0, 5))) for _ in range(300)]
    spellings = TokenSpellings(Vocabulary(table, frozenset(), ()))
    for _ in range(60):
        text = bytes(rng.choices(b"abc\xff", k=rng.randrange(1, 6)))
        marks = np.zeros(len(table), bool)
        spellings.mark(text, marks)
        for token, spelling in enumerate(table):
            can_end = text in spelling or any(spelling.startswith(text[k:]) for k in range(1, len(text)))
            assert marks[token] == can_end, (text, spelling)


def test_many_different_stops_keep_the_tables_small() -> None:
    engine = make_engine(Setup(max_num_seqs=4))
    rows = [Request(i, np.array([1, 2], np.int32), SamplingParams(max_tokens=3, ignore_eos=True, stop=(f"no{i}",))) for i in range(900)]
    run_checked(engine, rows)
    assert len(engine.stopper._watchers) <= 300


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"max_tokens": 5, "min_tokens": 10}, "min_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"n": 0}, "n=0"),
        ({"n": 200}, "n=200"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": [1, 2]}, "logit_bias"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["half \ud800"]}, "bad_words"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 1000}, "prompt_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 2, "top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 1000}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"max_token": 5}, "max_token"),
    ],
)
def test_a_wrong_parameter_is_named(given: dict[str, object], word: str) -> None:
    with pytest.raises(InputError, match=word):
        SamplingParams().updated(given)


def test_parameters_that_ask_for_nothing_pass() -> None:
    same = SamplingParams().updated(
        {"n": 1, "best_of": 1, "logprobs": False, "top_logprobs": 0, "logit_bias": {}, "bad_words": [], "repetition_penalty": 1.0}
        | {"response_format": {"type": "text"}}
    )
    assert same == SamplingParams()
    assert SamplingParams().updated({"logprobs": True}).logprobs == 0
    assert SamplingParams().updated({"logprobs": True, "top_logprobs": 4}).logprobs == 4
    assert SamplingParams().updated({"logprobs": 3}).logprobs == 3
    assert SamplingParams().updated({"logit_bias": {"5": 250, 7: -1.5, "9": None}}).logit_bias == ((5, 100.0), (7, -1.5))
    assert SamplingParams().updated({"n": 3, "best_of": 3}).n == 3
    assert SamplingParams().updated({"max_completion_tokens": 24.0}).max_tokens == 24
    assert SamplingParams().updated({"stop": "x"}).stop == ("x",)
    assert SamplingParams(finish := 7).max_tokens == finish
    assert FinishReason.STOP == "stop"
