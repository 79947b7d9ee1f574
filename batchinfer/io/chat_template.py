"""A checkpoint's chat template: where it stands, and how a conversation becomes a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from batchinfer.errors import InputError, ModelError
from batchinfer.io.chat_options import PLAIN_CHAT, ChatOptions
from batchinfer.io.chat_sandbox import BUDGET, Budget, SandboxedTemplates, TemplateBoundError, characters_of
from batchinfer.weights.checkpoint import open_file

TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 4 << 20
MAX_MESSAGE = 500  # characters of an error that stand in a row's record
PLACE = "\uf8ff\ue5a7"  # a private-use text that marks a place in a rendering


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, place: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`; a syntax error is a `ModelError` that names `place`."""
        self.source = source
        self.special_tokens = dict(special_tokens)
        try:
            self._template = SandboxedTemplates().from_string(source)
        except jinja2.TemplateSyntaxError as err:
            raise ModelError(f"{place}: the chat template has a syntax error in line {err.lineno}: {err.message}") from err
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, OverflowError, MemoryError) as err:
            raise ModelError(f"{place}: the chat template cannot be compiled: {err}") from err

    def render(self, messages: list[dict[str, Any]], date: datetime | None, options: ChatOptions = PLAIN_CHAT) -> str:
        """The prompt of a conversation; whatever the template raises is an `InputError`, with the template's own words.

        With `continue_final` it ends with the last message's content: what the template writes behind it is left out.
        """
        if options.continue_final:
            return self._up_to_last_content(messages, date, options)
        now = date if date is not None else datetime.now()
        variables: dict[str, Any] = {
            **self.special_tokens,
            **options.variables,
            "messages": messages,
            "tools": list(options.tools) or None,
            "add_generation_prompt": options.add_generation_prompt,
            "strftime_now": now.strftime,
            BUDGET: Budget(characters_of(messages) + characters_of(options.tools) + characters_of(options.variables)),
        }
        variables.setdefault("documents", None)
        return render_bounded(self._template, variables, "the chat template", "conversation")

    def _up_to_last_content(self, messages: list[dict[str, Any]], date: datetime | None, options: ChatOptions) -> str:
        """Rendered with a mark behind the last content, and cut there: the place is then known whatever stands around it."""
        last = messages[-1]
        mark = PLACE
        while any(mark in str(message["content"]) for message in messages):
            mark += PLACE
        marked = [*messages[:-1], {**last, "content": last["content"] + mark}]
        text = self.render(marked, date, replace(options, continue_final=False, add_generation_prompt=False))
        at = text.rfind(mark)
        if at < 0:
            raise InputError(
                "continue_final_message: the chat template does not write the last message's content as it is, so nothing can go on with it",
                "template_error",
            )
        return text[:at].replace(mark, "")


def render_bounded(template: jinja2.Template, variables: dict[str, Any], name: str, given: str) -> str:
    """What a sandboxed template writes; anything that it raises is an `InputError` that begins with `name`. `given` says over what."""
    try:
        return template.render(variables)
    except TemplateBoundError as err:
        raise InputError(f"{name} was stopped: {err}", "template_error") from err
    except jinja2.UndefinedError as err:
        raise InputError(f"{name} failed: {str(err)[:MAX_MESSAGE]}", "template_error") from err
    except jinja2.TemplateError as err:
        raise InputError(f"{name} refused the {given}: {str(err)[:MAX_MESSAGE]}", "template_error") from err
    except Exception as err:  # a stranger's template can raise anything: it is this row's error, never the job's
        raise InputError(f"{name} failed: {type(err).__name__}: {str(err)[:MAX_MESSAGE]}", "template_error") from err


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
