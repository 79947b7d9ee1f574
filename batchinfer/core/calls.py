"""An answer that must be tool calls (`StructureKind.CALLS`): the parts that it is written in, and reading it by them.

The form is an object: `open`, `close` and `between` are lists of parts, `between` null where only one call may stand;
`calls` holds for each tool what stands before its arguments (`begin`), their JSON schema (`arguments`) and what stands
behind (`end`). A part is text, `{"token": id, "text": ...}` for a special token, or `{"maybe": text}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from batchinfer.core.structure import Structure, StructureKind, bounded

Part = str | dict[str, Any]
Fault = Callable[[int, Any], str | None]  # what is wrong with the arguments of a call of the tool of this index


def calls_structure(form: dict[str, Any], place: str) -> Structure:
    """The structure of a form; `InputError` that names `place` where it is too large."""
    return Structure(StructureKind.CALLS, bounded(json.dumps(form, ensure_ascii=False, separators=(",", ":")), place))


def calls_fault(form: dict[str, Any], text: str, fault: Fault) -> str | None:
    """What is wrong with a finished answer, None where it is calls and nothing else. Special tokens may be hidden or not."""
    at = _passed(form["open"], text, 0)
    while at is not None:
        at, found = _call(form["calls"], text, at, fault)
        if at is None:
            return found
        end = _passed(form["close"], text, at)
        if end is not None and end == len(text):
            return None
        if form["between"] is None:
            return "more follows the call"
        at = _passed(form["between"], text, at)
    return "it is no tool call"


def _call(calls: Sequence[dict[str, Any]], text: str, start: int, fault: Fault) -> tuple[int | None, str | None]:
    """The place behind a call, or what is wrong with it."""
    for index, call in enumerate(calls):
        at = _passed(call["begin"], text, start)
        if at is None or not text.startswith("{", at):  # a name may begin with another one
            continue
        try:
            arguments, at = json.JSONDecoder().raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            return None, f"its arguments are not JSON: {error}"
        found = fault(index, arguments)
        if found is not None:
            return None, found
        at = _passed(call["end"], text, at)
        return at, None if at is not None else "the call is not closed"
    return None, "it is no call of one of the tools"


def _passed(parts: Sequence[Part], text: str, at: int) -> int | None:
    """The place behind the parts, None where they do not stand at `at`."""
    for part in parts:
        literal = part if isinstance(part, str) else part.get("text", part.get("maybe"))
        assert isinstance(literal, str)
        if text.startswith(literal, at):
            at += len(literal)
        elif isinstance(part, str):
            return None
    return at
