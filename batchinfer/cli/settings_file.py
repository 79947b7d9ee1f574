"""`--config FILE`: a TOML file whose keys are long flag names, laid under the command line."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

from batchinfer.errors import ConfigError

AS_JSON = frozenset({"choices"})  # flags that take a list as JSON, too
NOT_IN_A_FILE = frozenset({"config", "version", "help"})


# Flags that say the same thing in different ways, of which a command takes one.
RIVALS = (
    ("response_format", "choices"),
    ("num_kv_blocks", "kv_cache_memory"),
    ("keep_columns", "drop_columns"),
    ("prompt_template", "prompt_column"),
    ("prompt_template", "messages_column"),
)


def overruled(context: typer.Context, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a settings file beside which the command line gives a rival: None for each, since the command line wins."""

    def given_by(name: str, source: str) -> bool:
        found = context.get_parameter_source(name) if name in values else None
        return found is not None and found.name == source

    pairs = [pair for rivals in RIVALS for pair in (rivals, rivals[::-1])]
    return {name: None for name, rival in pairs if given_by(name, "DEFAULT_MAP") and given_by(rival, "COMMANDLINE")}


def apply_settings_file(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults of this command's flags, so that the command line wins over them."""
    if path is None or context.resilient_parsing:
        return path
    values = read_settings(path)
    by_key = _flags_by_key(context)
    defaults: dict[str, Any] = dict(context.default_map or {})
    for key, value in values.items():
        if key not in by_key:
            near = get_close_matches(key, by_key, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{path}: unknown key {key!r}: `{context.command_path}` has no flag --{key}{hint}")
        parameter, means_on = by_key[key]
        defaults[parameter.name] = _converted(path, key, value, parameter, means_on)
    context.default_map = defaults
    return path


def read_settings(path: Path) -> dict[str, Any]:
    """The keys and values of a settings file; a table only groups them."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid TOML: {error}") from None
    if any(isinstance(value, dict) and "hub" in value for value in document.values()):
        raise ConfigError(f"--config {path}: a list of model names, not of settings; -m takes these names, and --config a file of flags")
    values: dict[str, Any] = {}
    for key, value in document.items():
        entries = value.items() if isinstance(value, dict) else [(key, value)]
        for name, setting in entries:
            if isinstance(setting, dict):
                raise ConfigError(f"{path}: key {name!r} holds a table; settings are one level deep")
            plain = name.replace("_", "-")
            if plain in values:
                raise ConfigError(f"{path}: key {plain!r} stands there twice")
            values[plain] = setting
    return values


def _flags_by_key(context: typer.Context) -> dict[str, tuple[Any, bool]]:
    """Every long flag name of the command, without dashes in front: its parameter, and whether it means on or off."""
    by_key: dict[str, tuple[Any, bool]] = {}
    for parameter in context.command.params:
        if parameter.param_type_name != "option" or parameter.name in NOT_IN_A_FILE:
            continue
        by_key.update({name[2:]: (parameter, True) for name in parameter.opts if name.startswith("--")})
        by_key.update({name[2:]: (parameter, False) for name in parameter.secondary_opts if name.startswith("--")})
    return by_key


def _converted(path: Path, key: str, value: Any, parameter: Any, means_on: bool) -> Any:
    if getattr(parameter, "is_bool_flag", False) or getattr(parameter, "is_flag", False):
        if not isinstance(value, bool):
            raise ConfigError(f"{path}: {key} = {value!r}: must be true or false")
        return value if means_on else not value
    if isinstance(value, list):
        if getattr(parameter, "multiple", False):
            return [str(item) for item in value]
        if any("," in str(item) for item in value):
            if key in AS_JSON:
                return json.dumps(value)
            raise ConfigError(f"{path}: {key} holds an entry with a comma, which separates entries of --{key}")
        return ",".join(str(item) for item in value)  # flags that hold a list take it with commas between
    if getattr(parameter, "multiple", False):
        return [str(value)]
    if isinstance(value, bool):
        raise ConfigError(f"{path}: {key} = {str(value).lower()}: --{key} takes a value, not true or false")
    return str(value)
