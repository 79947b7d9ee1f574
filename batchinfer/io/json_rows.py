"""One line of JSON to a row: strict UTF-8, every oddity a row error, never an exception."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from batchinfer.errors import InputError
from batchinfer.io.record import InputRow

MAX_DEPTH = 512  # of lists and objects in each other; Python reads and writes some 900 below a shallow stack
BLANK = b" \t\r\n"
SPACE = " \t\r\n"
CONSTANTS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
KINDS = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "true or false", type(None): "null"}


class JsonParser:
    """Parses lines, and notices what a strict reader of the output would stumble over (NaN, keys given twice)."""

    def __init__(self) -> None:
        self._odd = False
        decoder = json.JSONDecoder(parse_constant=self._constant, object_pairs_hook=self._object)
        # The decoder's own scanner: `decode()` spends half its time around it.
        self._scan: Callable[[str, int], tuple[Any, int]] = decoder.scan_once  # type: ignore[attr-defined]

    def _constant(self, name: str) -> float:
        self._odd = True
        return CONSTANTS[name]

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            self._odd = True  # the last one wins
        return made

    def parse(self, row: InputRow) -> None:
        """Fill `values` and `plain`, or `error`."""
        try:
            text = row.raw.decode()
        except UnicodeDecodeError as error:
            row.error = InputError(f"{row.place}: not UTF-8: byte 0x{row.raw[error.start]:02x} at byte {error.start + 1}", "invalid_utf8")
            return
        self._odd = False
        try:
            value, end = self.value_in(text)
        except InputError as error:
            row.error = InputError(f"{row.place}: {error}", error.code)
            return
        if type(value) is not dict:
            row.error = InputError(f"{row.place}: a row must be a JSON object, got {KINDS.get(type(value), 'an object')}", "not_an_object")
            return
        if text.count("{") + text.count("[") > MAX_DEPTH and depth_beyond(value, MAX_DEPTH):
            row.error = InputError(f"{row.place}: JSON is nested more than {MAX_DEPTH} deep", "invalid_json")
            return
        row.values = value
        row.plain = not self._odd and end == len(text) and text.startswith("{")

    def value_in(self, text: str) -> tuple[Any, int]:
        """The one JSON value in `text` and where it ends; `InputError` for anything else."""
        start = 0 if text[:1] == "{" else len(text) - len(text.lstrip(SPACE))
        try:
            value, end = self._scan(text, start)
        except StopIteration as stop:
            raise InputError(f"not JSON: expected a value at column {stop.value + 1}", "invalid_json") from None
        except json.JSONDecodeError as error:
            raise InputError(
                f"not JSON: {error.msg[:1].lower()}{error.msg[1:].removesuffix(' at')} at column {error.pos + 1}", "invalid_json"
            ) from None
        except RecursionError:
            raise InputError(f"JSON is nested more than {MAX_DEPTH} deep", "invalid_json") from None
        except ValueError:  # int() refuses numbers of more than some 4,300 digits
            raise InputError("JSON holds a number with too many digits", "invalid_json") from None
        if end != len(text) and text[end:].strip(SPACE):
            raise InputError(f"not JSON: more text after the object, at column {end + 1}; one object a line", "invalid_json")
        return value, end


def depth_beyond(value: Any, most: int) -> bool:
    """True when lists and objects stand more than `most` deep in each other."""
    level = [value]
    for _ in range(most):
        level = [
            inside for item in level if isinstance(item, dict | list) for inside in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)


def raw_text(raw: bytes) -> str:
    """The line as text for the output; bytes that are no UTF-8 show as `\\xe9`."""
    return raw.decode("utf-8", "backslashreplace")
