"""Tool calls and reasoning in generated text: taken apart where the form is known, text otherwise."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.request import FinishReason, Result
from batchinfer.core.vocabulary import Vocabulary
from batchinfer.io.answers import AnswerReader, Reading, split_reasoning
from batchinfer.io.chat_options import PLAIN_CHAT, ChatOptions
from batchinfer.io.tool_calls import FORMATS, Call, find_format, read_hermes, read_llama, read_mistral

ADD = '{"name": "add", "arguments": {"a": 1, "b": "ü"}}'
CALL = Call("add", '{"a": 1, "b": "ü"}')


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (read_hermes, f"<tool_call>\n{ADD}\n</tool_call>", ("", [CALL])),
        (read_hermes, f"Let me see.\n<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}", ("Let me see.", [CALL, CALL])),
        (read_hermes, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [Call("add", '{"a": 1}')])),
        (read_hermes, '<tool_call>{"name": "now"}</tool_call>', ("", [Call("now", "{}")])),
        (read_hermes, '<tool_call>{"name": "add", "argum', None),
        (read_hermes, "<tool_call><function=add></function></tool_call>", None),
        (read_hermes, "no call", None),
        (read_mistral, f"[TOOL_CALLS] [{ADD}, {ADD}]", ("", [CALL, CALL])),
        (read_mistral, 'Yes.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now{}', ("Yes.", [Call("add", '{"a": 1}'), Call("now", "{}")])),
        (read_mistral, "[TOOL_CALLS] [", None),
        (read_mistral, "[TOOL_CALLS] []", None),
        (read_llama, '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', ("", [Call("add", '{"a": 1}')])),
        (read_llama, '{"name": "add", "parameters": {}}; {"name": "add", "parameters": {}}', ("", [Call("add", "{}")] * 2)),
        (read_llama, '{"name": "Maria", "parameters": {}}', None),
        (read_llama, '{"name": "add", "parameters": {}} I think', None),
        (read_llama, '{"name": "add", "parameters": [1]}', None),
    ],
)
def test_calls(read: Any, text: str, expected: Any) -> None:
    assert read(text, {"add"}) == expected


@given(
    st.sampled_from(FORMATS),
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "{", "}", ";", ADD, "x", "[ARGS]", '"'])),
)
def test_any_text_is_read_or_stays(known: Any, parts: list[str]) -> None:
    found = known.read("".join(parts), {"add"})
    if found is not None:
        assert all(isinstance(json.loads(call.arguments), dict) for call in found[1])


def test_deep_and_long_calls_stay_text() -> None:
    assert read_hermes("<tool_call>" + '{"name":' * 100_000, set()) is None
    assert read_hermes("<tool_call>{}" * 1000, set()) is None
    assert read_llama(";".join([ADD] * 1000), {"add"}) is None


def test_calls_of_any_depth_stay_text_at_most() -> None:
    """Near the end of Python's stack a call can be read and not be written."""
    for depth in range(500, 1000):
        deep = '{"a":' * depth + "1" + "}" * depth
        for known, text in (
            (read_hermes, '<tool_call>{"name":"f","arguments":' + deep + "}"),
            (read_llama, '{"name":"f","parameters":' + deep + "}"),
            (read_mistral, "[TOOL_CALLS]f[ARGS]" + deep),
        ):
            known(text, {"f"})  # type: ignore[operator]


def test_the_format_is_known_by_its_marks() -> None:
    def named(template: str, *tokens: str) -> str | None:
        found = find_format(template, tokens.__contains__)
        return found and found.name

    assert named("... <tool_call></tool_call> ...") == "hermes"
    assert named("", "[TOOL_CALLS]") == "mistral"
    assert named("", "<|python_tag|>") == "llama3"
    assert named("plain") is None


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nhm\n</think>\n\nYes", None, ("hm", "Yes")),
        ("hm</think>Yes", None, ("hm", "Yes")),
        ("hm</think>Yes", 0, ("hm", "Yes")),
        ("still thinking", 0, ("still thinking", "")),
        ("<think>cut", None, ("cut", "")),
        ("[THINK]a[/THINK]b", None, ("a", "b")),
        ("No tags <think>later", None, None),
        ("plain", None, None),
    ],
)
def test_reasoning(text: str, opened: int | None, expected: Any) -> None:
    assert split_reasoning(text, opened) == expected


def test_marks_that_are_special_tokens_are_seen_though_the_text_hides_them() -> None:
    vocabulary = Vocabulary([*(bytes([i]) for i in range(128)), b"[TOOL_CALLS]", b"</s>"], frozenset({128, 129}), (129,))
    ids = [*b"ok ", 128, *f"[{ADD.replace('ü', 'u')}]".encode(), 129]
    result = Result(7, vocabulary.decode(ids), FinishReason.STOP, np.array(ids, np.int32))
    assert "[TOOL_CALLS]" not in result.text
    reader = AnswerReader(vocabulary, FORMATS[0], marks=frozenset({128}))
    answer = reader.read(result, Reading(frozenset({"add"})))
    assert answer.text == "ok"
    assert answer.tool_calls is not None
    assert answer.tool_calls[0]["function"] == {"name": "add", "arguments": '{"a": 1, "b": "u"}'}
    assert reader.read(result).text == result.text  # a row without tools
    assert reader.read(result, Reading(frozenset({"add"}), cut_by_strings=True)).tool_calls is None


def test_what_to_keep_of_a_row() -> None:
    reader = AnswerReader(Vocabulary([b"a"], frozenset(), ()), split_reasoning=True)
    assert reader.reading_of(PLAIN_CHAT, "assistant\n<think>\n", ()).opened == 0
    assert reader.reading_of(PLAIN_CHAT, "assistant\n<think>\n\n</think>\n", ()).opened is None
    called = ChatOptions(({"function": {"name": "f"}},), must_call=frozenset({"f"}))
    assert reader.reading_of(called, "assistant\n<think>\n", ("x",)) == Reading(frozenset({"f"}), must_call=True)
