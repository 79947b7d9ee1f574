"""Lines of OpenAI's batch format: what they ask for, every field honoured, harmless, or an error by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from batchinfer.core.request import PARAMETER_NAMES, SamplingParams
from batchinfer.errors import InputError
from batchinfer.io.chat_options import CHAT_FIELDS, NEUTRAL_CHAT, PLAIN_CHAT, ChatOptions, ChatReader
from batchinfer.io.messages import clean_messages
from batchinfer.io.params import ParamReader
from batchinfer.io.record import InputRow
from batchinfer.io.rows import Ask, looks_like_openai, token_ids

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT_FIELD = {CHAT: "messages", TEXT: "prompt"}
IGNORED = frozenset({"model", "user", "metadata", "store", "service_tier"})
# Fields that ask for nothing when they hold this value; null asks for nothing anywhere.
NEUTRAL: dict[str, Any] = {
    "stream": False,
    "echo": False,
    "functions": [],
    "function_call": "none",
    "suffix": "",
    "modalities": ["text"],
    "truncate_prompt_tokens": None,
}


class OpenAIRows:
    """Reads OpenAI batch lines."""

    def __init__(self, defaults: SamplingParams, row_params: bool = True, chat: ChatOptions = PLAIN_CHAT) -> None:
        self._chat = ChatReader(chat, "body.")
        self._params = ParamReader(defaults)
        self._row_params = row_params

    def read(self, values: dict[str, Any]) -> Ask:
        """What the line asks for, or `InputError`."""
        if not looks_like_openai(values):
            raise InputError("not an OpenAI batch line (custom_id, method, url, body) in a file of them", "wrong_shape")
        if not isinstance(values["custom_id"], str):
            raise InputError(f"custom_id must be a string, got {values['custom_id']!r:.80}", "invalid_custom_id")
        if values.get("method") != "POST":
            raise InputError(f"method must be POST, got {values.get('method')!r:.80}", "invalid_method")
        url, body = values["url"], values["body"]
        if not isinstance(url, str) or url not in PROMPT_FIELD:
            raise InputError(f"url {url!r:.80} is not supported; use {CHAT} or {TEXT}", "invalid_url")
        if not isinstance(body, dict):
            raise InputError(f"body must be an object, got {type(body).__name__}", "invalid_body")
        params = self._params.read(self._given(body, PROMPT_FIELD[url]))
        prompt = body.get(PROMPT_FIELD[url])
        if prompt is None:
            raise InputError(f"body.{PROMPT_FIELD[url]} is missing: there is no prompt", "no_prompt")
        if url == CHAT:
            return Ask(params, messages=clean_messages(prompt, "body.messages"), chat=self._chat.read(body))
        return _text_prompt(prompt, params)

    def _given(self, body: dict[str, Any], prompt_field: str) -> dict[str, Any]:
        given: dict[str, Any] = {}
        for name, value in body.items():
            if name == prompt_field or name in IGNORED or value is None:
                continue
            if name in PARAMETER_NAMES:
                if self._row_params:
                    given[name] = value
            elif name in CHAT_FIELDS:
                if prompt_field != PROMPT_FIELD[CHAT] and value != NEUTRAL_CHAT[name]:
                    raise InputError(f"body.{name} is for {CHAT}; a completion has no chat template", "unsupported_parameter")
            elif name not in NEUTRAL:
                raise InputError(f"body.{name} is not a field that this version knows; remove it", "unknown_parameter")
            elif value != NEUTRAL[name]:
                raise InputError(f"body.{name}={value!r:.80} is not supported by this version; remove it", "unsupported_parameter")
        return given


def _text_prompt(prompt: Any, params: SamplingParams) -> Ask:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        if not prompt:
            raise InputError("body.prompt is empty", "empty_prompt")
        return Ask(params, prompt=prompt, raw=True)
    if isinstance(prompt, list) and any(isinstance(item, str | list) for item in prompt):
        raise InputError("body.prompt holds several prompts; write one line for each", "unsupported_parameter")
    ids: np.ndarray = token_ids(prompt, "body.prompt")
    return Ask(params, token_ids=ids)


def other_models(rows: Iterable[InputRow], model: str) -> list[str]:
    """Models that the lines name and that are not the one at work."""
    named: dict[str, None] = {}
    for row in rows:
        body = row.values.get("body") if row.values is not None else None
        asked = body.get("model") if isinstance(body, dict) else None
        if isinstance(asked, str) and asked != model:
            named[asked] = None
    return list(named)
