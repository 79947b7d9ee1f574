"""What a row's generated text holds beside the answer: tool calls and reasoning, taken apart when the row has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from batchinfer.core.request import Result
from batchinfer.core.vocabulary import Vocabulary
from batchinfer.io.chat_options import ChatOptions
from batchinfer.io.tool_calls import ToolFormat

# How reasoning is set apart by the models that do; the first pair that fits counts.
REASONING_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)


@dataclass(frozen=True, slots=True)
class Reading:
    """What must be known of a row to read its answer, beyond the answer."""

    tool_names: frozenset[str] = frozenset()
    one_call: bool = False
    opened: int | None = None  # the reasoning tags (their place in REASONING_TAGS) whose first one ends the prompt
    cut_by_strings: bool = False  # stop strings: what was cut off must not come back
    must_call: bool = False  # the answer is tool calls and nothing else, or the row has failed


PLAIN_READING = Reading()


@dataclass(frozen=True, slots=True)
class Answer:
    """A row's text, taken apart. `tool_calls` are OpenAI's records."""

    text: str
    tool_calls: list[dict[str, Any]] | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Reads answers of one model. Without tools and without reasoning to split, the text is the answer."""

    vocabulary: Vocabulary
    tool_format: ToolFormat | None = None
    split_reasoning: bool = False
    marks: frozenset[int] = field(default_factory=frozenset)  # special tokens that calls and reasoning are marked with

    def reading_of(self, chat: ChatOptions, prompt: str, stop: Sequence[str]) -> Reading:
        """What to keep of a row until its answer is there."""
        if chat.must_call:
            return Reading(chat.tool_names, chat.one_call, must_call=True)
        tool_names, opened = chat.tool_names, None
        if self.split_reasoning:
            tail = prompt[-64:].rstrip()
            opened = next((index for index, (first, _) in enumerate(REASONING_TAGS) if tail.endswith(first)), None)
        if not tool_names and opened is None and not (self.split_reasoning and stop):
            return PLAIN_READING
        return Reading(tool_names, chat.one_call, opened, bool(stop))

    def read(self, result: Result, reading: Reading = PLAIN_READING) -> Answer:
        """The answer of a row that ended well."""
        calls_tools = self.tool_format is not None and bool(reading.tool_names)
        if not self.split_reasoning and not calls_tools:
            return Answer(result.text)
        text = self._with_marks(result, reading)
        reasoning: str | None = None
        if self.split_reasoning and not reading.must_call:
            split = split_reasoning(text, reading.opened)
            if split is not None:
                reasoning, text = split
        calls: list[dict[str, Any]] | None = None
        if calls_tools:
            assert self.tool_format is not None
            found = self.tool_format.read(text, reading.tool_names)
            if found is not None:
                text, made = found
                made = made[:1] if reading.one_call else made
                calls = [call.record(result.row, index) for index, call in enumerate(made)]
        if calls is None and reasoning is None:
            return Answer(result.text)
        return Answer(text, calls, reasoning)

    def _with_marks(self, result: Result, reading: Reading) -> str:
        """The text with the special tokens that mark calls and reasoning, which it may not show."""
        ids = result.token_ids
        if not self.marks or reading.cut_by_strings or not np.isin(ids, list(self.marks)).any():
            return result.text
        hidden = self.vocabulary.special_ids - self.marks
        return self.vocabulary.continuation([i for i in ids.tolist() if i not in hidden], skip_special_tokens=False)


def split_reasoning(text: str, opened: int | None = None) -> tuple[str, str] | None:
    """(reasoning, the answer behind it), None where there is no reasoning.

    Reasoning stands at the beginning, between tags; the first tag is missing where the prompt ends with it (`opened`) or
    the model leaves it out. Reasoning that is cut off has no answer.
    """
    begin = text.lstrip()
    for index, (first, last) in enumerate(REASONING_TAGS):
        if begin.startswith(first):
            body = begin[len(first) :]
        elif opened == index or (opened is None and last in text):
            body = text
        else:
            continue
        reasoning, _, answer = body.partition(last)
        return reasoning.strip(), answer.lstrip()
    return None
