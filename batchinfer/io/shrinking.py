"""How many bytes of a text one token can stand for at most."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

# Normalisers that never make a text shorter.
GROWING = {"Prepend", "Replace", "ByteLevel"}


def bytes_per_token(backend: Any, token_bytes: Sequence[bytes]) -> int | None:
    """The longest token's bytes; None where a normaliser, an added token or an unknown token may swallow more."""
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # such tokens take the white space beside them along
        return None
    if not _keeps_length(json.loads(backend.normalizer.__getstate__()) if backend.normalizer is not None else None):
        return None
    model = json.loads(backend.model.__getstate__()) if _is_bpe(backend) else None
    if model is None or (model["unk_token"] is not None and not model["byte_fallback"]):
        return None  # unknown characters are fused into one token, or the model is of another kind
    return max(map(len, token_bytes), default=1) or 1


def _is_bpe(backend: Any) -> bool:
    return type(backend.model).__name__ == "BPE"


def _keeps_length(normaliser: dict[str, Any] | None) -> bool:
    if normaliser is None:
        return True
    if normaliser["type"] == "Sequence":
        return all(_keeps_length(step) for step in normaliser["normalizers"])
    if normaliser["type"] == "Replace":
        pattern = normaliser["pattern"].get("String")
        return pattern is not None and len(normaliser["content"].encode()) >= len(pattern.encode())
    return normaliser["type"] in GROWING
