"""Bytes per token id, from what a tokenizer's decoder does, so that joining bytes equals the tokenizer's own decoding."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batchinfer.errors import UnsupportedModel

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
METASPACE = "\u2581"


@dataclass(frozen=True, slots=True, eq=False)
class TokenBytes:
    """`table[id]` is what the id adds to a text; one leading space of a text is dropped when `strip_leading_space`.

    `byte_ids` are the tokens that stand for one byte each, in vocabularies that fall back on them.
    """

    table: list[bytes]
    strip_leading_space: bool
    byte_ids: frozenset[int] = frozenset()


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else a letter from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


def token_bytes(tokens: Sequence[str | None], decoder: Any, place: str) -> TokenBytes:
    """The table for `tokens` under a `tokenizers` decoder; None entries are ids without a token."""
    settings: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
    steps: list[dict[str, Any]] = settings["decoders"] if settings["type"] == "Sequence" else [settings]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenBytes(_byte_level(tokens), False)
    if kinds == ["Metaspace"]:
        step = steps[0]
        return TokenBytes(_replaced(tokens, step["replacement"], " ", False), step["prepend_scheme"] != "never")
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return _sentencepiece(tokens, steps, place)
    raise UnsupportedModel(
        f"{place}: tokenizer decoder {' + '.join(kinds)} is not supported by this version; supported: ByteLevel, Metaspace, ByteFallback"
    )


def _byte_level(tokens: Sequence[str | None]) -> list[bytes]:
    letters = _Letters({ord(char): byte for char, byte in byte_alphabet().items()})
    table = []
    for token in tokens:
        text = token or ""
        try:
            table.append(text.translate(letters).encode("latin-1"))
        except UnicodeEncodeError:
            table.append(text.encode("utf-8", "replace"))
    return table


class _Letters(dict[int, int]):
    """Code points of the alphabet to those of their bytes, any other to one that is no byte: for `str.translate`."""

    def __missing__(self, code: int) -> int:
        return 0x100


def _sentencepiece(tokens: Sequence[str | None], steps: Sequence[dict[str, Any]], place: str) -> TokenBytes:
    replace = [step for step in steps if step["type"] == "Replace"]
    strip = [step for step in steps if step["type"] == "Strip"]
    good_replace = all("String" in step["pattern"] and len(step["pattern"]["String"]) > 0 for step in replace) and len(replace) <= 1
    good_strip = all(step["content"] == " " and step["start"] <= 1 and step["stop"] == 0 for step in strip) and len(strip) <= 1
    if not (good_replace and good_strip):
        raise UnsupportedModel(f"{place}: tokenizer decoder {json.dumps(list(steps))[:200]} is not supported by this version")
    old, new = (replace[0]["pattern"]["String"], replace[0]["content"]) if replace else (METASPACE, METASPACE)
    byte_ids = frozenset(index for index, token in enumerate(tokens) if token and BYTE_TOKEN.fullmatch(token))
    return TokenBytes(_replaced(tokens, old, new, True), bool(strip and strip[0]["start"]), byte_ids)


def _replaced(tokens: Sequence[str | None], old: str, new: str, byte_fallback: bool) -> list[bytes]:
    table = []
    for token in tokens:
        match = BYTE_TOKEN.fullmatch(token or "") if byte_fallback else None
        table.append(bytes([int(match.group(1), 16)]) if match else (token or "").replace(old, new).encode("utf-8", "replace"))
    return table
