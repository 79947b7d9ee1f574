"""`tool_choice`: rows whose answer must be a tool call, as a structure in the model's own way of writing calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchinfer.core.calls import Part, calls_structure
from batchinfer.core.structure import Structure
from batchinfer.errors import InputError
from batchinfer.io.chat_options import ChatOptions
from batchinfer.io.tool_calls import MAYBE_BLANK, ToolFormat

BARE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")  # what the reader takes for a name that is not quoted
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}  # of a function without parameters, as OpenAI has it


@dataclass(frozen=True, slots=True)
class CallWriter:
    """Makes structures for one model. `special` are the ids of those marks that are special tokens."""

    known: ToolFormat | None = None
    special: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, known: ToolFormat | None, special_ids_of: Callable[[Iterable[str]], frozenset[int]]) -> CallWriter:
        """For a model that writes calls in this way; `special_ids_of` tells which texts are special tokens."""
        marks = known.marks if known is not None else ()
        return cls(known, {mark: index for mark in marks for index in special_ids_of((mark,))})

    def structure(self, options: ChatOptions) -> Structure | None:
        """What the answer must look like; None where the row leaves it to the model.

        Raises `InputError` for a model whose way of writing calls is not known, and for tools that it cannot write.
        """
        if not options.must_call:
            return None
        if self.known is None:
            raise InputError(
                "tool_choice asks for a call, and this model's way of writing them is not known; use auto or none", "unsupported_parameter"
            )
        form = self.known.form
        several = form.between is not None and not options.one_call
        functions = {str(tool["function"]["name"]): tool["function"] for tool in options.tools}
        wanted = {
            "open": self._parts(*form.open),
            "calls": [self._call(name, function) for name, function in functions.items() if name in options.must_call],
            "between": self._parts(*(form.between or ())) if several else None,
            "close": self._parts(*form.close),
        }
        return calls_structure(wanted, "tools")

    def _call(self, name: str, function: Mapping[str, Any]) -> dict[str, Any]:
        assert self.known is not None
        form = self.known.form
        if not form.quoted and BARE_NAME.fullmatch(name) is None:
            raise InputError(
                f"the tool {name!r:.80} has a name that this model cannot write: letters, digits and _.- only", "invalid_tools"
            )
        said = json.dumps(name, ensure_ascii=False) if form.quoted else name
        return {
            "begin": self._parts(*form.before, said, *form.middle),
            "arguments": _arguments(function, name),
            "end": self._parts(*form.after),
        }

    def _parts(self, *texts: str) -> list[Part]:
        """Neighbouring texts in one, marks that are special tokens by their ids."""
        parts: list[Part] = []
        for text in texts:
            if text == MAYBE_BLANK:
                parts.append({"maybe": " "})
            elif text in self.special:
                parts.append({"token": self.special[text], "text": text})
            elif parts and isinstance(parts[-1], str):
                parts[-1] += text
            else:
                parts.append(text)
        return parts


def _arguments(function: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object in any case."""
    parameters = function.get("parameters")
    if parameters is None:
        return NO_ARGUMENTS
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InputError(f"the parameters of the tool {name!r:.80} must be an object, got type {kind!r:.80}", "invalid_tools")
    return {**parameters, "type": "object"}
