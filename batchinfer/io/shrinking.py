"""How many bytes of a text one token can stand for at most."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import models

# Steps before the model that never make a text shorter.
NORMALISERS = ("Prepend", "ByteLevel")
PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace")


def bytes_per_token(backend: Any, token_bytes: Sequence[bytes]) -> int | None:
    """The longest token's bytes; None where some step may drop text or swallow any length of it in one token."""
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # such tokens take the white space beside them along
        return None
    model = backend.model
    if not isinstance(model, models.BPE) or len({token for token in token_bytes if len(token) == 1}) < 256:
        return None  # characters outside the vocabulary are dropped, or many become one unknown token
    if not all(_keeps_length(step) for step in (*_steps(backend.normalizer), *_steps(backend.pre_tokenizer))):
        return None
    return max(map(len, token_bytes))


def _steps(component: Any) -> list[dict[str, Any]]:
    """Settings of a normaliser or pre-tokenizer, sequences laid out flat."""
    return _flat(json.loads(component.__getstate__())) if component is not None else []


def _flat(settings: dict[str, Any]) -> list[dict[str, Any]]:
    if settings["type"] != "Sequence":
        return [settings]
    return [step for inner in settings.get("normalizers") or settings.get("pretokenizers") or [] for step in _flat(inner)]


def _keeps_length(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(step["content"].encode()) >= len(pattern.encode())
    if step["type"] == "Split":
        return bool(step["behavior"] != "Removed")
    return step["type"] in NORMALISERS or step["type"] in PRE_TOKENIZERS
