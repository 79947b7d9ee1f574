"""A result as the columns that stand behind the input's: names, order, and their JSON and Arrow forms."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchinfer.core.request import FinishReason, Result
from batchinfer.io.answers import Answer
from batchinfer.io.json_text import dump_json
from batchinfer.io.logprob_text import ASKED_NAMES

_quoted: Callable[[str], str] = json.encoder.encode_basestring

TEXT, REASON, NUM_INPUT, NUM_GENERATED, ERROR = "generated_text", "finish_reason", "num_input_tokens", "num_generated_tokens", "error"
TOKEN_IDS, TOOL_CALLS, REASONING, METRICS = "generated_token_ids", "tool_calls", "reasoning", "metrics"


@dataclass(frozen=True, slots=True)
class ResultColumns:
    """Which result columns a job writes, and the prefix of their names."""

    prefix: str = ""
    token_ids: bool = False
    tool_calls: bool = False
    reasoning: bool = False
    metrics: bool = False

    @property
    def plain_names(self) -> tuple[str, ...]:
        """The columns' names without the prefix, in order."""
        names = (TEXT, REASON, NUM_INPUT, NUM_GENERATED, ERROR)
        asked = {TOKEN_IDS: self.token_ids, TOOL_CALLS: self.tool_calls, REASONING: self.reasoning, METRICS: self.metrics}
        return (*names, *(name for name, wanted in asked.items() if wanted))

    @property
    def names(self) -> tuple[str, ...]:
        """The columns' names in the output, in order."""
        return tuple(self.prefix + name for name in self.plain_names)

    @property
    def reserved(self) -> tuple[str, ...]:
        """Names that no input column may have: also those of columns that only some rows ask for."""
        return (*self.names, *(self.prefix + name for name in ASKED_NAMES))

    def fragment(self, result: Result, answer: Answer | None = None, metrics: dict[str, Any] | None = None) -> str:
        """The columns as JSON members without braces, ready to stand behind the input's own; names without prefix.

        `answer` is the result's text taken apart; without it the text stands as it is.
        """
        error = result.error
        answer = answer or Answer(result.text)
        if error is None:
            text = (
                f'"generated_text":{_quoted(answer.text)},"finish_reason":"{result.finish_reason.value}",'
                f'"num_input_tokens":{result.num_prompt_tokens},"num_generated_tokens":{result.num_generated_tokens},"error":null'
            )
        else:
            text = (
                f'"generated_text":null,"finish_reason":"{FinishReason.ERROR.value}","num_input_tokens":{result.num_prompt_tokens},'
                f'"num_generated_tokens":0,"error":{{"code":{_quoted(error.code)},"message":{_quoted(error.message)}}}'
            )
        if self.token_ids:
            ids = "null" if error is not None else "[" + ",".join(map(str, result.token_ids.tolist())) + "]"
            text += f',"generated_token_ids":{ids}'
        if self.tool_calls:
            text += f',"tool_calls":{dump_json(answer.tool_calls)}'
        if self.reasoning:
            text += f',"reasoning":{dump_json(answer.reasoning)}'
        if self.metrics:
            text += f',"metrics":{dump_json(metrics)}'
        return text

    def renamed(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of a fragment under their names in the output."""
        asked = [name for name in ASKED_NAMES if name in fields]
        return {self.prefix + name: fields.get(name) for name in (*self.plain_names, *asked)}
