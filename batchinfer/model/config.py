"""`ModelConfig`: the architecture as data, read from a Hugging Face folder or from GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchinfer.errors import ModelError, UnsupportedModel
from batchinfer.weights.gguf import GgufHeader, read_gguf
from batchinfer.weights.json_file import read_json
from batchinfer.weights.source import ModelFiles


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretching of slow rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotary embedding over the whole head.

    The inverse frequencies `theta ** (-2i / head_dim)` are stretched by `scaling`, or divided one by one by
    `freq_factors` (head_dim / 2 numbers); at most one of the two is set.
    """

    theta: float
    scaling: Llama3Scaling | None = None
    freq_factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The architecture of a decoder as data.

    `dtype` is the checkpoint's own (`bf16`, `float16` or `float32`); for a quantised GGUF file `float32`, which is
    what its tensors dequantise to. `attention_bias` is about q, k and v; `o_bias` about the output projection.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    rotary: RotarySpec
    attention_bias: bool
    o_bias: bool
    mlp_bias: bool
    tied_head: bool
    attn_scale: float
    dtype: str

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model by canonical name, in loading order, with its shape ([out, in] for matrices)."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        linears = (
            ("q", q_size, hidden, self.attention_bias),
            ("k", kv_size, hidden, self.attention_bias),
            ("v", kv_size, hidden, self.attention_bias),
            ("o", hidden, q_size, self.o_bias),
            ("gate", inner, hidden, self.mlp_bias),
            ("up", inner, hidden, self.mlp_bias),
            ("down", hidden, inner, self.mlp_bias),
        )
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            prefix = f"layers.{layer}."
            shapes[prefix + "attn_norm.weight"] = (hidden,)
            shapes[prefix + "mlp_norm.weight"] = (hidden,)
            for name, rows, columns, has_bias in linears:
                shapes[f"{prefix}{name}.weight"] = (rows, columns)
                if has_bias:
                    shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes["norm.weight"] = (hidden,)
        if not self.tied_head:
            shapes["head.weight"] = (self.vocab_size, hidden)
        return shapes


def read_model_config(files: ModelFiles, header: GgufHeader | None = None) -> ModelConfig:
    """The model's architecture; refuses by name what this version does not run. `header`: of the GGUF file, where it was read."""
    from batchinfer.model.families import family_of_gguf, family_of_hf
    from batchinfer.model.gguf_config import hf_keys_of

    if files.kind == "gguf":
        header = header or read_gguf(files.path)
        family = family_of_gguf(header.architecture, files.path)
        return check_config(family.config_from_hf(hf_keys_of(header, family), str(files.path)), files.path)
    place = files.path / "config.json"
    data = read_json(place)
    family = family_of_hf(data, place)
    return check_config(family.config_from_hf(data, str(place)), place)


def check_config(config: ModelConfig, place: Path) -> ModelConfig:
    """Return `config` when its sizes fit one another, else raise `ModelError`."""
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{place}: {config.num_heads} attention heads cannot share {config.num_kv_heads} key-value heads evenly")
    if config.head_dim % 2:
        raise ModelError(f"{place}: head_dim {config.head_dim} is odd; rotary embedding needs pairs")
    factors = config.rotary.freq_factors
    if factors is not None and (len(factors) != config.head_dim // 2 or not all(0 < f < 1e9 for f in factors)):
        raise ModelError(
            f"{place}: {len(factors)} rotary frequency factors for a head of {config.head_dim}; expected {config.head_dim // 2} positive ones"
        )
    return config


class Keys:
    """Typed reading of a config's keys: a wrong type or a missing key is a `ModelError` that names both.

    Keeps account of what was read, so that `refuse_unknown` can say what was left.
    """

    def __init__(self, data: dict[str, Any], place: str) -> None:
        self.data, self.place = data, place
        self.seen: set[str] = set()

    def try_value(self, key: str) -> Any:
        """The value as it stands, or None."""
        self.seen.add(key)
        return self.data.get(key)

    def count(self, key: str) -> int:
        """A positive integer that must be there."""
        value = self.try_count(key)
        if value is None:
            raise ModelError(f"{self.place}: has no {key}")
        return value

    def try_count(self, key: str) -> int | None:
        """A positive integer, or None where the key is absent or null."""
        value = self.try_value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise ModelError(f"{self.place}: {key} is {_show(value)}; must be a positive integer")
        return value

    def number(self, key: str) -> float:
        """A positive number that must be there."""
        value = self.try_number(key)
        if value is None:
            raise ModelError(f"{self.place}: has no {key}")
        return value

    def try_number(self, key: str) -> float | None:
        """A positive number, or None where the key is absent or null."""
        value = self.try_value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ModelError(f"{self.place}: {key} is {_show(value)}; must be a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false; the architecture's own `default` where the key is absent or null."""
        value = self.try_value(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{self.place}: {key} is {_show(value)}; must be true or false")
        return value

    def must_be(self, key: str, *allowed: Any) -> None:
        """Refuse the model when `key` is there with a value that is not among `allowed` (null always is)."""
        value = self.try_value(key)
        if value is not None and not any(value == word and isinstance(value, bool) == isinstance(word, bool) for word in allowed):
            raise UnsupportedModel(
                f"{self.place}: {key}={_show(value)} is not supported by this version; supported: {', '.join(map(str, allowed)) or 'none (null)'}"
            )


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
