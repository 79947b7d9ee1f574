"""Architecture name -> family. A family is a module with `config_from_hf()`, a name map, and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchinfer.errors import ModelError, UnsupportedModel
from batchinfer.model.config import ModelConfig
from batchinfer.model.families import llama


@dataclass(frozen=True, slots=True)
class Family:
    """How one family's checkpoints are read."""

    name: str
    architectures: tuple[str, ...]
    gguf_architecture: str
    gguf_permuted_qk: bool
    names: Mapping[str, str]
    config_from_hf: Callable[[dict[str, Any], str], ModelConfig]


FAMILIES = (Family("llama", llama.ARCHITECTURES, llama.GGUF_ARCHITECTURE, llama.GGUF_PERMUTED_QK, llama.NAMES, llama.config_from_hf),)

BY_NAME = {family.name: family for family in FAMILIES}
BY_ARCHITECTURE = {word: family for family in FAMILIES for word in family.architectures}
BY_GGUF = {family.gguf_architecture: family for family in FAMILIES}


def family_of_hf(data: Mapping[str, Any], place: Path) -> Family:
    """The family of a config.json, or a refusal by name."""
    words = data.get("architectures")
    if words is None and data.get("model_type") in BY_NAME:  # configs written by hand leave `architectures` out
        return BY_NAME[data["model_type"]]
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise ModelError(f"{place}: architectures is {str(words)[:80]}; expected a list such as ['LlamaForCausalLM']")
    for word in words:
        if word in BY_ARCHITECTURE:
            return BY_ARCHITECTURE[word]
    raise _unsupported(", ".join(words), ", ".join(BY_ARCHITECTURE), place)


def family_of_gguf(architecture: str, place: Path) -> Family:
    """The family of a GGUF file's architecture, or a refusal by name."""
    if architecture not in BY_GGUF:
        raise _unsupported(architecture, ", ".join(BY_GGUF), place)
    return BY_GGUF[architecture]


def _unsupported(word: str, known: str, place: Path) -> UnsupportedModel:
    return UnsupportedModel(f"{place}: architecture {word} is not supported by this version; supported: {known}")
