"""The grammar of an answer that must be tool calls, and the check of a finished one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from batchinfer.core.calls import Part, calls_fault
from batchinfer.runtime.schema_check import SchemaCheck


def call_grammar(form: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Lark for llguidance: the parts as they stand, arguments by their schemas, written as `options` say."""
    calls = range(len(form["calls"]))
    more = "" if form["between"] is None else f"({_words([*form['between']])} call)*"
    rules = [f"start: {_words(form['open'])} call {more} {_words(form['close'])}", f"call: {' | '.join(f'call_{i}' for i in calls)}"]
    for i, call in enumerate(form["calls"]):
        schema = json.dumps({**call["arguments"], "x-guidance": options})
        rules += [f"call_{i}: {_words(call['begin'])} arguments_{i} {_words(call['end'])}", f"arguments_{i}: %json {schema}"]
    return "\n".join(rules)


def _words(parts: Sequence[Part]) -> str:
    return " ".join(map(_word, parts))


def _word(part: Part) -> str:
    if isinstance(part, str):
        return json.dumps(part)
    return f"<[{part['token']}]>" if "token" in part else f"{json.dumps(part['maybe'])}?"


class CallsCheck:
    """Reads finished answers: calls in the form that was asked for, arguments that their schemas allow."""

    def __init__(self, form: dict[str, Any]) -> None:
        self._form = form
        self._checks = [SchemaCheck(call["arguments"]) for call in form["calls"]]

    def fault(self, text: str) -> str | None:
        """What is wrong with the text, None where it is valid."""
        return calls_fault(self._form, text, lambda index, arguments: self._checks[index].fault_of(arguments))
