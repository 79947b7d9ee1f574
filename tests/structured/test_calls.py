"""`tool_choice`: rows that must call a tool do, in each way of writing calls, and say so where they cannot."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from jsonschema import validate

from batchinfer.core.structure import Structure
from batchinfer.core.vocabulary import Vocabulary
from batchinfer.errors import InputError
from batchinfer.io.chat_options import ChatOptions, ChatReader
from batchinfer.io.tool_calls import FORMATS, MAX_CALLS, ToolFormat, find_format
from batchinfer.io.tool_choice import CallWriter
from batchinfer.runtime.grammar import GrammarCompiler

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 14}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "weather_now", "description": "takes nothing"}},
    {"type": "function", "function": {"name": "time", "parameters": {"properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"], "additionalProperties": False}}},
]  # fmt: skip
SCHEMAS = {
    "weather": WEATHER,
    "weather_now": {"type": "object", "maxProperties": 0},
    "time": {**TOOLS[2]["function"]["parameters"], "type": "object"},
}
TEMPLATES = {
    "hermes": "<tool_call>\n...\n</tool_call>",
    "mistral": "[TOOL_CALLS] [...]",
    "mistral, named": "[TOOL_CALLS]name[ARGS]{}",
    "llama3": "<|python_tag|>",
}
MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"]
EOS = 256


def vocabulary(special: bool) -> Vocabulary:
    """Bytes, an end token, and the marks as special tokens or not there at all."""
    marks = [mark.encode() for mark in MARKS] if special else []
    spelt = [*(bytes([i]) for i in range(256)), b"<eos>", *marks]
    return Vocabulary(spelt, frozenset(range(EOS, len(spelt))), (EOS,))


def known_format(template: str) -> ToolFormat:
    found = find_format(TEMPLATES[template], lambda token: False)
    assert found is not None
    return found


def structure(template: str, special: bool, **asked: Any) -> Structure:
    words = vocabulary(special).token_bytes
    ids = {text.decode("latin-1"): index for index, text in enumerate(words) if index > EOS}
    writer = CallWriter.of(known_format(template), lambda texts: frozenset(ids[text] for text in texts if text in ids))
    made = writer.structure(ChatReader().read({"tools": TOOLS, "tool_choice": "required", **asked}))
    assert made is not None
    return made


def answers(made: Structure, words: Vocabulary, count: int) -> list[tuple[str, str]]:
    """Texts that the masks allow, as people see them and with all special tokens but the end."""
    grammar = GrammarCompiler(words, lambda text: list(text.encode())).compile(made)
    found = []
    for seed in range(count):
        rng, matcher, ids = np.random.default_rng(seed), grammar.start(), list[int]()
        while not matcher.is_stopped():
            allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            token = int(rng.choice(np.flatnonzero(allowed)))
            assert matcher.consume_token(token), matcher.get_error()
            if token == EOS:
                break
            ids.append(token)
        found.append((words.continuation(ids), words.continuation(ids, skip_special_tokens=False)))
        assert grammar.judge(found[-1][0]) is grammar.judge(found[-1][1]) is None, found[-1]
    return found


@pytest.mark.parametrize("special", [False, True], ids=["marks as text", "marks as special tokens"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_whatever_the_masks_allow_is_read_as_calls_that_fit_their_schemas(template: str, special: bool) -> None:
    known, names, most = known_format(template), dict.fromkeys(SCHEMAS, 0), 0
    for _, text in answers(structure(template, special), vocabulary(special), 40):
        read = known.read(text, set(SCHEMAS))
        assert read is not None, text
        beside, calls = read
        assert (beside, 1 <= len(calls) <= MAX_CALLS) == ("", True)
        most = max(most, len(calls))
        for call in calls:
            names[call.name] += 1
            validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert all(names.values()), "each tool is called at times"
    assert (most > 1) == (template != "llama3"), "several calls, where the model can write them"


@pytest.mark.parametrize("template", TEMPLATES)
def test_one_function_by_name_and_no_parallel_calls(template: str) -> None:
    known = known_format(template)
    for asked in ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, {"parallel_tool_calls": False}):
        for _, text in answers(structure(template, True, **asked), vocabulary(True), 20):
            read = known.read(text, set(SCHEMAS))
            assert read is not None
            assert len(read[1]) == 1
            assert read[1][0].name == "weather" or "tool_choice" not in asked


def test_a_finished_answer_that_is_no_call_is_found() -> None:
    grammar = GrammarCompiler(vocabulary(False), lambda text: list(text.encode())).compile(structure("hermes", False))
    good = '<tool_call>\n{"name": "time", "arguments": {"zone": "UTC"}}\n</tool_call>'
    assert grammar.judge(good) is grammar.judge(f"{good}\n{good}") is None
    for wrong in (
        "",
        good[:-1],
        good[:40],
        good + " ",
        good.replace("UTC", "GMT"),
        good.replace("time", "tide"),
        f"{good}\n",
        f"So: {good}",
    ):
        assert grammar.judge(wrong) is not None, wrong


@pytest.mark.parametrize(
    "asked, words",
    [
        ({"tool_choice": "required", "tools": []}, "needs tools"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "gone"}}, "tools": TOOLS}, "'gone', which is none of the tools"),
        ({"tool_choice": {"type": "function", "name": "time"}, "tools": TOOLS}, "not understood"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "not understood"),
        ({"tool_choice": "always", "tools": TOOLS}, "not understood"),
        ({"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]}, "must be an object"),
    ],
)
def test_choices_that_cannot_be_made_are_the_rows_errors(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        CallWriter(FORMATS[1]).structure(ChatReader().read(asked))


def test_the_choice_may_be_json_text_and_a_function_may_be_called_as_the_words_are() -> None:
    tools = [{"function": {"name": name}} for name in ("required", "none", "other")]
    for name in ("required", "none"):
        choice = json.dumps({"type": "function", "function": {"name": name}})
        options = ChatReader().read({"tools": tools, "tool_choice": choice})
        assert (options.must_call, options.one_call) == ({name}, True)
    for word in ("required", '"required"'):  # a table whose cells differ in type holds JSON text
        assert ChatReader().read({"tools": tools, "tool_choice": word}).must_call == {"required", "none", "other"}
    assert CallWriter(FORMATS[1]).structure(ChatReader().read({"tools": tools, "tool_choice": "auto"})) is None


def test_a_model_without_a_known_format_and_a_name_that_cannot_be_written() -> None:
    tools = ({"function": {"name": "the weather"}},)
    with pytest.raises(InputError, match="not known") as caught:
        CallWriter().structure(ChatOptions(tools, must_call=frozenset({"the weather"})))
    assert caught.value.code == "unsupported_parameter"
    with pytest.raises(InputError, match="cannot write"):
        CallWriter(known_format("mistral, named")).structure(ChatOptions(tools, must_call=frozenset({"the weather"})))
    assert find_format("<tool_call><function=x>", lambda token: False) is None, "another way of writing between the same tags"
