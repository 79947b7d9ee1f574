"""A checkpoint's chat template: where it stands, and how a conversation becomes a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from batchinfer.errors import InputError, ModelError
from batchinfer.io.chat_sandbox import BUDGET, Budget, SandboxedTemplates, TemplateBoundError
from batchinfer.weights.checkpoint import open_file

TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 4 << 20
MAX_MESSAGE = 500  # characters of an error that stand in a row's record


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, place: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`; a syntax error is a `ModelError` that names `place`."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = SandboxedTemplates().from_string(source)
        except jinja2.TemplateSyntaxError as err:
            raise ModelError(f"{place}: the chat template has a syntax error in line {err.lineno}: {err.message}") from err
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, OverflowError, MemoryError) as err:
            raise ModelError(f"{place}: the chat template cannot be compiled: {err}") from err

    def render(self, messages: list[dict[str, Any]], date: datetime | None, add_generation_prompt: bool) -> str:
        """The prompt of a conversation; whatever the template raises is an `InputError`, with the template's own words."""
        now = date if date is not None else datetime.now()
        budget = Budget(_characters(messages))
        variables: dict[str, Any] = {
            **self._special_tokens,
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": now.strftime,
            BUDGET: budget,
        }
        try:
            return self._template.render(variables)
        except TemplateBoundError as err:
            raise InputError(f"the chat template was stopped: {err}", "template_error") from err
        except jinja2.TemplateError as err:
            raise InputError(f"the chat template refused the conversation: {str(err)[:MAX_MESSAGE]}", "template_error") from err
        except Exception as err:  # a stranger's template can raise anything: it is this row's error, never the job's
            raise InputError(f"the chat template failed: {type(err).__name__}: {str(err)[:MAX_MESSAGE]}", "template_error") from err


def folder_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> tuple[str, str] | None:
    """A folder's chat template and where it stands: chat_template.jinja first, then tokenizer_config.json."""
    path = folder / TEMPLATE_FILE
    if path.exists() or path.is_symlink():
        with open_file(path) as file:
            raw = file.read(MAX_TEMPLATE_BYTES + 1)
        if len(raw) > MAX_TEMPLATE_BYTES:
            raise ModelError(f"{path}: larger than {MAX_TEMPLATE_BYTES:,} bytes; not a chat template")
        try:
            return raw.decode("utf-8"), str(path)
        except UnicodeDecodeError as err:
            raise ModelError(f"{path}: not UTF-8: {err}") from err
    place = str(folder / "tokenizer_config.json")
    source = choose_template(tokenizer_config.get("chat_template"), place)
    return None if source is None else (source, place)


def choose_template(value: Any, place: str) -> str | None:
    """The template from a string, or from a list of named ones: `default`, or the only one."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(item, dict) and isinstance(item.get("template"), str) for item in value):
        raise ModelError(f"{place}: chat_template is neither a text nor a list of named templates")
    by_name = {str(item.get("name")): item["template"] for item in value}
    if "default" in by_name:
        return str(by_name["default"])
    if len(by_name) == 1:
        return str(next(iter(by_name.values())))
    if not by_name:
        return None
    raise ModelError(f"{place}: chat_template has no 'default' among {', '.join(by_name)}; put the one to use into {TEMPLATE_FILE}")


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_characters(key) + _characters(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(_characters(item) + 1 for item in value)
    return 1
