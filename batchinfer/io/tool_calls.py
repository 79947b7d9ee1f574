"""Tool calls in generated text: which way of writing them a model has, and the calls as OpenAI's records.

A format is known by the tokens that its calls are marked with; a model without one of them has no format, and its text
stays text. So does a call that is cut off or is no valid JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

MAX_CALLS = 128
HERMES, MISTRAL, LLAMA = "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>"
ARGUMENTS = "[ARGS]"
MISTRAL_NAME = re.compile(r"\s*([A-Za-z0-9_.-]{1,256})\s*(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\])?\s*(?=\{)")
HERMES_END = "</tool_call>"
MAYBE_BLANK = " ?"  # in a form: SentencePiece writes a blank where a word begins


@dataclass(frozen=True, slots=True)
class Call:
    """One call: a function's name, and its arguments as JSON text."""

    name: str
    arguments: str

    def record(self, row: int, index: int) -> dict[str, Any]:
        """The call as OpenAI writes it; the id follows from the row, so that runs compare."""
        mark = blake2b(f"{row}:{index}:{self.name}".encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
        return {"id": f"call_{mark}", "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a call is written that a row must make: texts and marks around a tool's name and its arguments.

    `between` None: a model of this kind makes one call at a time.
    """

    before: tuple[str, ...]
    middle: tuple[str, ...]
    after: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    between: tuple[str, ...] | None = ()
    quoted: bool = True  # the name is a JSON string


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls. `read` gives (text beside the calls, calls), or None where the text holds none."""

    name: str
    marks: tuple[str, ...]  # tokens that the reader must see, special or not
    read: Callable[[str, Collection[str]], tuple[str, list[Call]] | None]
    form: CallForm


def read_hermes(text: str, names: Collection[str]) -> tuple[str, list[Call]] | None:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write them; the last end tag may be missing."""
    before, *blocks = text.split(HERMES)
    calls, beside = [], [before]
    for block in blocks:
        body, _, after = block.partition(HERMES_END)
        call = _call(_json(body))
        if call is None:
            return None
        calls.append(call)
        beside.append(after)
    return _found("".join(beside), calls)


def read_mistral(text: str, names: Collection[str]) -> tuple[str, list[Call]] | None:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or newer `[TOOL_CALLS]name[ARGS]{...}` once for each call."""
    before, *blocks = text.split(MISTRAL)
    calls: list[Call | None] = []
    for block in blocks:
        named = MISTRAL_NAME.match(block)
        if named is not None:
            arguments = _json(block[named.end() :])
            calls.append(_made(named[1], arguments))
        else:
            listed = _json(block)
            calls += [_call(item) for item in listed] if isinstance(listed, list) else [None]
    return _found(before, calls)


def read_llama(text: str, names: Collection[str]) -> tuple[str, list[Call]] | None:
    """`{"name": ..., "parameters": {...}}` and nothing else, several with `;` between, as Llama 3.1 and later write them.

    Such text may also be an ordinary answer in JSON, so that only the names of tools that the row gave count.
    """
    rest = text.strip().removeprefix(LLAMA).strip()
    decoder = json.JSONDecoder()
    calls: list[Call | None] = []
    while rest and len(calls) <= MAX_CALLS:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        call = _call(value)
        calls.append(call if call is not None and call.name in names else None)
        rest = rest[end:].strip()
        if rest and not rest.startswith(";"):
            return None
        rest = rest.removeprefix(";").strip()
    return _found("", calls)


MISTRAL_MARKS = (MISTRAL, ARGUMENTS, "[CALL_ID]")
MISTRAL_LIST = CallForm(('{"name": ',), (', "arguments": ',), ("}",), (MISTRAL, MAYBE_BLANK, "["), ("]",), (", ",))
MISTRAL_NAMED = CallForm((MISTRAL,), (ARGUMENTS,), quoted=False)
FORMATS = (
    ToolFormat("mistral", MISTRAL_MARKS, read_mistral, MISTRAL_LIST),
    ToolFormat(
        "hermes",
        (HERMES, HERMES_END),
        read_hermes,
        CallForm((HERMES, '\n{"name": '), (', "arguments": ',), ("}\n", HERMES_END), between=("\n",)),
    ),
    ToolFormat("llama3", (LLAMA,), read_llama, CallForm(('{"name": ',), (', "parameters": ',), ("}",), between=None)),
)
OTHER_BODIES = ("<function=", "<arg_key>")  # what some models write between the same tags is no JSON


def find_format(template: str, has_token: Callable[[str], bool]) -> ToolFormat | None:
    """The way that a model writes tool calls, by what its template writes and its vocabulary holds; None when none is known."""
    if any(body in template for body in OTHER_BODIES):
        return None
    for known in FORMATS:
        mark = known.marks[0]
        if mark in template or has_token(mark):
            named = known.name == "mistral" and (ARGUMENTS in template or (mark not in template and has_token(ARGUMENTS)))
            return replace(known, form=MISTRAL_NAMED) if named else known
    return None


def _found(beside: str, calls: list[Call | None] | list[Call]) -> tuple[str, list[Call]] | None:
    good = [call for call in calls if call is not None]
    if not good or len(good) != len(calls) or len(good) > MAX_CALLS:
        return None
    return beside.strip(), good


def _call(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    return _made(value["name"], arguments)


def _made(name: str, arguments: Any) -> Call | None:
    if not isinstance(arguments, dict):
        return None
    try:
        return Call(name, json.dumps(arguments, ensure_ascii=False))
    except RecursionError:  # deeper than Python writes, though not than it reads
        return None


def _json(text: str) -> Any:
    try:
        return json.loads(text.strip())
    except (ValueError, RecursionError):
        return None
