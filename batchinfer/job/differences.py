"""What differs between two jobs, in words: by the flags that people type, not by the names in our records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from batchinfer.io.manifest import differences

MAX_DIFFERENCES = 8
MAX_CHARS = 80
FOLLOWS = "input.columns.token_ids"  # has no flag: it changes with the two beside it
FLAGS = {
    "rendering.chat": "--chat/--no-chat",
    "sampling.row_params": "--row-params/--no-row-params",
    "sampling.job_seed": "--seed",
    "input.columns.prompt": "--prompt-column",
    "input.columns.messages": "--messages-column",
    "input.columns.id": "--id-column",
    "prefix": "--output-prefix",
}


def said(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Each difference as a phrase: `--temperature was 0.0, is 0.7`."""
    return [_phrase(path, before, now) for path, before, now in differences(old, new) if path != FOLLOWS]


def listed(phrases: list[str]) -> str:
    """The phrases in a row, the first few of them."""
    return "; ".join(phrases[:MAX_DIFFERENCES]) + ("; ..." if len(phrases) > MAX_DIFFERENCES else "")


def said_versions(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The same for versions of software, which have names of their own."""
    return [f"{path} was {_short(before)}, is {_short(now)}" for path, before, now in differences(old, new)]


def _phrase(path: str, before: Any, now: Any) -> str:
    if path == "input.files":
        return _phrase_of_files(before or [], now or [])
    if path == "model":
        return "the model's files are not those of before (-m, --revision)"
    flag = FLAGS.get(path) or "--" + path.rpartition(".")[2].replace("_", "-")
    return f"{flag} was {_short(before)}, is {_short(now)}"


def _phrase_of_files(before: list[Any], now: list[Any]) -> str:
    names, names_now = [str(file[0]) for file in before], [str(file[0]) for file in now]
    if names != names_now:
        if len(names) == len(names_now) == 1:
            return f"the input was {names[0]}, is {names_now[0]}"
        one = next((name for name in [*names_now, *names] if (name in names) != (name in names_now)), names_now[0] if names_now else "")
        return f"the input was {len(names):,} files, is {len(names_now):,} ({one} makes the difference)"
    for old, new in zip(before, now, strict=True):
        if old != new:
            sizes = "" if old[1] == new[1] else f" ({old[1]:,} bytes then, {new[1]:,} now)"
            return f"{new[0]} was modified since the job began{sizes}"
    return "the input is another one"


def _short(value: object) -> str:
    if value is None:
        return "not given"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 3] + "..."
