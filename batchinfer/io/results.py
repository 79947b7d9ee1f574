"""A result as the columns that stand behind the input's: names, order, and their JSON and Arrow forms."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchinfer.core.request import FinishReason, Result

_quoted: Callable[[str], str] = json.encoder.encode_basestring

TEXT, REASON, NUM_INPUT, NUM_GENERATED, ERROR = "generated_text", "finish_reason", "num_input_tokens", "num_generated_tokens", "error"
TOKEN_IDS = "generated_token_ids"


@dataclass(frozen=True, slots=True)
class ResultColumns:
    """Which result columns a job writes, and the prefix of their names."""

    prefix: str = ""
    token_ids: bool = False

    @property
    def plain_names(self) -> tuple[str, ...]:
        """The columns' names without the prefix, in order."""
        names = (TEXT, REASON, NUM_INPUT, NUM_GENERATED, ERROR)
        return (*names, TOKEN_IDS) if self.token_ids else names

    @property
    def names(self) -> tuple[str, ...]:
        """The columns' names in the output, in order."""
        return tuple(self.prefix + name for name in self.plain_names)

    def fragment(self, result: Result) -> str:
        """The columns as JSON members without braces, ready to stand behind the input's own; names without prefix."""
        error = result.error
        if error is None:
            text = (
                f'"generated_text":{_quoted(result.text)},"finish_reason":"{result.finish_reason.value}",'
                f'"num_input_tokens":{result.num_prompt_tokens},"num_generated_tokens":{len(result.token_ids)},"error":null'
            )
        else:
            text = (
                f'"generated_text":null,"finish_reason":"{FinishReason.ERROR.value}","num_input_tokens":{result.num_prompt_tokens},'
                f'"num_generated_tokens":0,"error":{{"code":{_quoted(error.code)},"message":{_quoted(error.message)}}}'
            )
        if self.token_ids:
            ids = "null" if error is not None else "[" + ",".join(map(str, result.token_ids.tolist())) + "]"
            text += f',"generated_token_ids":{ids}'
        return text

    def renamed(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of a fragment under their names in the output."""
        return {self.prefix + name: fields.get(name) for name in self.plain_names}
