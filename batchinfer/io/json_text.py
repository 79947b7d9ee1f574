"""Strict JSON text of anything a row can hold: no NaN, no bytes, no Python types."""

from __future__ import annotations

import base64
import json
import math
from decimal import Decimal
from typing import Any


def dump_json(value: Any) -> str:
    """Strict JSON on one line. NaN and infinities become null, bytes base64, decimals and other types text."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
    except ValueError:
        return json.dumps(without_nan(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)


def encode_json(text: str) -> bytes:
    """UTF-8 of JSON text; half surrogate pairs, which UTF-8 cannot hold, become JSON escapes."""
    return text.encode("utf-8", "backslashreplace")


def _plain(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Decimal):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()  # NumPy scalars: float16
    return str(value)


def without_nan(value: Any) -> Any:
    """The value with null in place of NaN and infinities, at any depth: without recursion, which would end before JSON does."""
    top = [value]
    waiting: list[Any] = [top]  # lists and objects of our own, whose items are still those of the value
    while waiting:
        holder = waiting.pop()
        for place, item in holder.items() if isinstance(holder, dict) else enumerate(holder):
            if isinstance(item, float):
                if not math.isfinite(item):
                    holder[place] = None
            elif isinstance(item, dict | list | tuple):
                copy = holder[place] = dict(item) if isinstance(item, dict) else list(item)
                waiting.append(copy)
    return top[0]
