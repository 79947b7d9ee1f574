"""`--response-format` and `--choices`: one structure for all rows that do not bring their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from batchinfer.errors import ConfigError

WORDS = ("text", "json_object")


def structure_values(response_format: str | None, choices: str | None) -> dict[str, Any]:
    """The flags as parameters. Raises `ConfigError` for what can never be one."""
    if response_format is not None and choices is not None:
        raise ConfigError("--response-format and --choices both say what answers must look like; give one of them")
    if choices is not None:
        return {"structured_outputs": {"choice": _choices(choices)}}
    return {} if response_format is None else {"response_format": _response_format(response_format)}


def _choices(text: str) -> list[str]:
    """Texts with commas between, or a JSON list where they hold commas themselves."""
    if text.lstrip().startswith("["):
        listed = _parsed(text, "--choices")
        if not isinstance(listed, list):
            raise ConfigError("--choices: must be a JSON list of texts, or texts with commas between")
        return listed
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise ConfigError(f"--choices {text!r}: must be texts with commas between, such as positive,negative")
    return found


def _response_format(text: str) -> dict[str, Any]:
    if text in WORDS:
        return {"type": text}
    flag = "--response-format"
    if text.startswith("@"):
        flag = f"--response-format {text}"
        try:
            text = Path(text[1:]).read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{flag}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    elif not text.lstrip().startswith("{"):
        raise ConfigError(f"--response-format {text}: must be {', '.join(WORDS)}, @FILE with a JSON schema, or the schema itself")
    value = _parsed(text, flag)
    if not isinstance(value, dict):
        raise ConfigError(f"{flag}: a JSON schema must be an object here")
    if "json_schema" in value or value.get("type") in WORDS:  # OpenAI's whole field
        return value
    return {"type": "json_schema", "json_schema": {"schema": value}}


def _parsed(text: str, flag: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag}: not JSON: {error}") from None
