"""Chat messages as users write them, checked and brought to what a chat template expects."""

from __future__ import annotations

import json
from typing import Any

from batchinfer.errors import InputError
from batchinfer.io.chat_options import check_depth

MAX_MESSAGES = 100_000
# Keys that reach the template by role: one that is given less would write another history.
PASSED_ON = {"assistant": ("tool_calls", "reasoning_content"), "tool": ("tool_call_id", "name")}


def clean_messages(value: object, name: str) -> list[dict[str, Any]]:
    """The messages with text contents and without null fields; `InputError` says which message is wrong.

    Role, content, an assistant's tool calls and `reasoning_content`, a tool's `tool_call_id` and `name` reach the template, other
    keys (`weight`, a user's `name`) never. Content given as text parts is joined. Arguments of tool calls are written as JSON text
    in OpenAI's form, and templates expect the object.
    """
    if not isinstance(value, list | tuple):
        raise InputError(f"{name} must be a list of messages, got {type(value).__name__}", "invalid_messages")
    if not value:
        raise InputError(f"{name} is empty: there is nothing to answer", "empty_prompt")
    if len(value) > MAX_MESSAGES:
        raise InputError(f"{name} holds {len(value):,} messages; at most {MAX_MESSAGES:,} are taken", "invalid_messages")
    return [_message(item, f"{name}[{index}]") for index, item in enumerate(value)]


def _message(item: object, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise InputError(f"{where} must be an object with role and content, got {_kind(item)}", "invalid_messages")
    role = item.get("role")
    if not isinstance(role, str) or not role:
        raise InputError(f"{where} needs a role (system, user, assistant or tool)", "invalid_messages")
    message: dict[str, Any] = {"role": role, "content": _content(item.get("content"), where, bool(item.get("tool_calls")))}
    for key in PASSED_ON.get(role, ()):
        if item.get(key) is not None and item[key] != []:
            message[key] = _calls(item[key], f"{where}.{key}") if key == "tool_calls" else _text(item[key], f"{where}.{key}")
    return message


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where} must be a string, got {_kind(value)}", "invalid_messages")
    return value


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list | tuple) or not all(isinstance(call, dict) for call in value):
        raise InputError(f"{where} must be a list of objects, got {_kind(value)}", "invalid_messages")
    check_depth(value, where)
    calls: list[dict[str, Any]] = [without_nulls(call) for call in value]
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = _arguments(function["arguments"])
    return calls


def _arguments(text: str) -> Any:
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text  # what a model once wrote, valid or not, is its history
    return arguments if isinstance(arguments, dict) else text


def _content(content: object, where: str, calls_tools: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if calls_tools:
            return ""
        raise InputError(f"{where} has no content", "invalid_messages")
    if not isinstance(content, list | tuple):
        raise InputError(f"{where}.content must be text or a list of text parts, got {_kind(content)}", "invalid_messages")
    return "".join(_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise InputError(f"{where} must be an object with a type, got {_kind(part)}", "invalid_messages")
    kind = part.get("type")
    if kind != "text":
        raise InputError(f"{where} has type {kind!r}; only text parts are supported", "unsupported_content")
    text = part.get("text")
    if not isinstance(text, str):
        raise InputError(f"{where}.text must be a string, got {_kind(text)}", "invalid_messages")
    return text


def without_nulls(value: Any) -> Any:
    """The value without keys that hold null, at any depth: tables write null for a key that a row does not have."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
