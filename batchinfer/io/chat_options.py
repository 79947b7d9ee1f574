"""What a row asks of the chat template beside its messages: tools, variables, a prefilled answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from batchinfer.errors import ConfigError, InputError

MAX_TOOLS = 512
MAX_DEPTH = 64  # of tool definitions, tool calls and template variables
RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "strftime_now", "raise_exception", "chat_template", "tokenize"}
)
CHAT_FIELDS = ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
_KNOWN = frozenset(CHAT_FIELDS)
# Values that ask for nothing, where there is no chat.
NEUTRAL_CHAT: dict[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "chat_template_kwargs": {},
    "add_generation_prompt": True,
    "continue_final_message": False,
}


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation is rendered. `variables` are the template's own, such as `enable_thinking`."""

    tools: tuple[dict[str, Any], ...] = ()
    one_call: bool = False  # of several tool calls in an answer only the first counts
    must_call: frozenset[str] = frozenset()  # the answer is a call of one of these tools; none: as the model likes
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final: bool = False  # the last message is a beginning that the answer goes on with

    @property
    def tool_names(self) -> frozenset[str]:
        """What the tools are called."""
        return frozenset(str(tool["function"]["name"]) for tool in self.tools)

    def extended(self, variables: Mapping[str, Any]) -> ChatOptions:
        """The same with further template variables."""
        return replace(self, variables={**self.variables, **variables}) if variables else self


PLAIN_CHAT = ChatOptions()


class ChatReader:
    """Reads the chat fields of rows over the job's own."""

    def __init__(self, defaults: ChatOptions = PLAIN_CHAT, prefix: str = "") -> None:
        self.defaults = defaults
        self._prefix = prefix  # stands before names in messages: "body."

    def asks(self, values: Mapping[str, Any]) -> bool:
        """True when any chat field is given."""
        return not _KNOWN.isdisjoint(values) and any(values.get(name) is not None for name in CHAT_FIELDS)

    def chat_only(self, values: Mapping[str, Any]) -> str | None:
        """The first field that asks for what only a chat can have."""
        return next((name for name in CHAT_FIELDS if values.get(name) is not None and values[name] != NEUTRAL_CHAT[name]), None)

    def read(self, values: Mapping[str, Any]) -> ChatOptions:
        """The row's options, or `InputError` naming the field."""
        if not self.asks(values):
            return self.defaults
        options, prefix = self.defaults, self._prefix
        if values.get("tools") is not None:
            options = replace(options, tools=read_tools(_decoded(values["tools"], prefix + "tools"), prefix + "tools"))
        options = _with_choice(options, values.get("tool_choice"), prefix + "tool_choice")
        parallel = _flag(values, "parallel_tool_calls", prefix)
        if parallel is not None:
            options = replace(options, one_call=not parallel)
        if values.get("chat_template_kwargs") is not None:
            name = prefix + "chat_template_kwargs"
            options = options.extended(read_variables(_decoded(values["chat_template_kwargs"], name), name))
        proceed, prompt = _flag(values, "continue_final_message", prefix), _flag(values, "add_generation_prompt", prefix)
        if proceed is not None:
            options = replace(options, continue_final=proceed)
        if prompt is not None:
            options = replace(options, add_generation_prompt=prompt)
        if proceed and prompt:
            raise InputError(
                f"{prefix}continue_final_message and {prefix}add_generation_prompt are both true; the answer goes on with the last "
                "message or begins a new one",
                "invalid_parameter",
            )
        return options


def job_chat(variables: str | None, tools: str | None) -> ChatOptions:
    """The chat options of the whole job from the flags' JSON texts; `ConfigError` names the flag."""
    try:
        made = PLAIN_CHAT
        if tools is not None:
            made = replace(made, tools=read_tools(_decoded(tools, "--tools"), "--tools"))
        if variables is not None:
            made = made.extended(read_variables(_decoded(variables, "--chat-template-kwargs"), "--chat-template-kwargs"))
        return made
    except InputError as error:
        raise ConfigError(str(error)) from None


def read_tools(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    """Tool definitions as OpenAI writes them, checked as far as a template relies on them."""
    if not isinstance(value, list | tuple):
        raise InputError(f"{name} must be a list of tool definitions, got {type(value).__name__}", "invalid_tools")
    if len(value) > MAX_TOOLS:
        raise InputError(f"{name} holds {len(value):,} tools; at most {MAX_TOOLS} are taken", "invalid_tools")
    check_depth(value, name)
    return tuple(_tool(tool, f"{name}[{index}]") for index, tool in enumerate(value))


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise InputError(f"{where} must be an object with type and function, got {type(tool).__name__}", "invalid_tools")
    if tool.get("type", "function") != "function":
        raise InputError(f"{where} has type {tool['type']!r:.80}; only functions are supported", "invalid_tools")
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise InputError(f"{where}.function must be an object with a name", "invalid_tools")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InputError(f"{where}.function.parameters must be a JSON schema, got {type(parameters).__name__}", "invalid_tools")
    return {**tool, "type": "function"}


def read_variables(value: Any, name: str) -> dict[str, Any]:
    """Variables for the template; those that rendering itself sets cannot be given."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InputError(f"{name} must be an object of template variables, got {type(value).__name__}", "invalid_parameter")
    taken = next((key for key in value if key in RESERVED), None)
    if taken is not None:
        raise InputError(f"{name} holds {taken!r}, which is not the template's own to set", "invalid_parameter")
    check_depth(value, name)
    return dict(value)


def check_depth(value: Any, name: str) -> None:
    """Raise `InputError` for what is nested deeper than any definition needs to be."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item for each in level if isinstance(each, dict | list | tuple) for item in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise InputError(f"{name} is nested more than {MAX_DEPTH} levels deep", "invalid_request")


def _with_choice(options: ChatOptions, value: Any, name: str) -> ChatOptions:
    """What `tool_choice` says of the tools: a word, or `{"type": "function", "function": {"name": ...}}`, also as JSON text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", '"'):
        value = _decoded(value, name)
    if value is None or value == "auto":
        return options
    if value == "none":
        return replace(options, tools=())
    wanted = options.tool_names if value == "required" else frozenset((_function_named(value, name),))
    if not options.tools:
        raise InputError(f"{name}={value!r:.80} needs tools, and there are none", "invalid_tools")
    if not wanted <= options.tool_names:
        raise InputError(f"{name} names {next(iter(wanted))!r:.80}, which is none of the tools", "invalid_tools")
    return replace(options, must_call=wanted, one_call=options.one_call or value != "required")


def _function_named(value: Any, name: str) -> str:
    if isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("function"), dict):
        named = value["function"].get("name")
        if isinstance(named, str):
            return named
    known = 'auto, none, required or {"type": "function", "function": {"name": ...}}'
    raise InputError(f"{name}={value!r:.80} is not understood; use {known}", "invalid_parameter")


def _flag(values: Mapping[str, Any], name: str, prefix: str) -> bool | None:
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{prefix}{name} must be true or false, got {value!r:.80}", "invalid_parameter")
    return value


def _decoded(value: Any, name: str) -> Any:
    """JSON text, as tables and the command line hold it, as its value."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise InputError(f"{name} holds text that is not JSON", "invalid_parameter") from None
