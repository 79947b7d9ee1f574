"""Offline batch LLM inference: a prompts file in, generated text out, in input order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchinfer.version import __version__

__all__ = ["LLM", "Engine", "EngineConfig", "Request", "Result", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from batchinfer.config import EngineConfig
    from batchinfer.core.request import Request, Result, SamplingParams
    from batchinfer.engine import Engine
    from batchinfer.llm import LLM

_HOMES = {
    "LLM": "batchinfer.llm",
    "Engine": "batchinfer.engine",
    "EngineConfig": "batchinfer.config",
    "Request": "batchinfer.core.request",
    "Result": "batchinfer.core.request",
    "SamplingParams": "batchinfer.core.request",
}


def __getattr__(name: str) -> Any:
    """Import a public name at first use, so that `batchinfer --help` does not pay for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'batchinfer' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
