"""GGUF metadata spelled as the keys of a Hugging Face config, so that a family has one way of reading both."""

from __future__ import annotations

from typing import Any

import numpy as np

from batchinfer.errors import ModelError, UnsupportedModel
from batchinfer.model.families import Family
from batchinfer.weights.gguf import GgufHeader, read_tensor

# Key after the architecture's prefix -> Hugging Face key.
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
REQUIRED = (
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
# Handled below, or without influence on the result.
OTHER = {
    "vocab_size",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.attn_factor",
    "attention.value_length",
    "attention.causal",
    "tensor_data_layout",
    "expert_count",
    "expert_used_count",
    "leading_dense_block_count",
    "nextn_predict_layers",
}
NOT_QUANTISED = {"BF16": "bfloat16", "F16": "float16"}


def hf_keys_of(header: GgufHeader, family: Family) -> dict[str, Any]:
    """The file's architecture under Hugging Face key names."""
    prefix = header.architecture + "."
    own = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    for key in REQUIRED:
        if key not in own:
            raise ModelError(f"{header.path}: metadata has no {prefix}{key}")
    for key, value in own.items():
        if key not in SIZES and key not in OTHER and not _is_off(value):
            raise UnsupportedModel(
                f"{header.path}: metadata key {prefix}{key} ({str(value)[:60]}) is not known to this version and may change the result"
            )
    data = {name: _uniform(header, key, own[key]) for key, name in SIZES.items() if key in own}
    embedding = header.entries.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{header.path}: has no matrix token_embd.weight; is it only a vocabulary, or one part of a split file?")
    head_dim = data.get("head_dim") or int(data["hidden_size"]) // int(data["num_attention_heads"])
    _refuse(header, own, head_dim)
    data |= {
        "vocab_size": embedding.shape[0],
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.entries,
        "attention_bias": "blk.0.attn_q.bias" in header.entries,
        "o_bias": "blk.0.attn_output.bias" in header.entries,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.entries,
        "dtype": _dtype(header),
        "rope_scaling": _linear_scaling(own),
        "gguf.rope_freqs": _freq_factors(header),
    }
    return data


def _is_off(value: Any) -> bool:
    return not np.any(value) if isinstance(value, np.ndarray) else not value


def _uniform(header: GgufHeader, key: str, value: Any) -> Any:
    """One number; a list (one per layer) must hold the same number throughout."""
    if isinstance(value, list | np.ndarray):
        if len(value) == 0 or any(item != value[0] for item in value):
            raise UnsupportedModel(f"{header.path}: {key} differs from layer to layer; not supported by this version")
        return value[0].item() if isinstance(value, np.ndarray) else value[0]
    return value


def _refuse(header: GgufHeader, own: dict[str, Any], head_dim: int) -> None:
    where = header.path
    if own.get("expert_count"):
        raise UnsupportedModel(f"{where}: a mixture of {own['expert_count']} experts is not supported by this version")
    if own.get("attention.causal") is False:
        raise UnsupportedModel(f"{where}: attention that is not causal is not supported by this version")
    if own.get("nextn_predict_layers") or own.get("leading_dense_block_count"):
        raise UnsupportedModel(f"{where}: layers of more than one kind are not supported by this version")
    if own.get("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(
            f"{where}: rotary embedding over {own['rope.dimension_count']} of {head_dim} dimensions is not supported by this version"
        )
    if own.get("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{where}: values of another size than keys are not supported by this version")
    if own.get("rope.scaling.attn_factor", 1.0) not in (0.0, 1.0):
        raise UnsupportedModel(f"{where}: rope.scaling.attn_factor {own['rope.scaling.attn_factor']} is not supported by this version")
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedModel(
            f"{where}: one part of a file split in {header.metadata['split.count']}; merge the parts (llama-gguf-split --merge)"
        )


def _linear_scaling(own: dict[str, Any]) -> dict[str, Any] | None:
    kind = own.get("rope.scaling.type", "none")
    factor = own.get("rope.scaling.factor", 0.0) or own.get("rope.scale_linear", 0.0)
    if kind == "none" and not own.get("rope.scale_linear"):
        return None
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": factor} if factor not in (0.0, 1.0) else None
    return {"rope_type": kind, "factor": factor}  # refused by name further on


def _freq_factors(header: GgufHeader) -> tuple[float, ...] | None:
    """The numbers that llama3-style scaling was turned into when the file was written."""
    entry = header.entries.get("rope_freqs.weight")
    if entry is None:
        return None
    if entry.format != "F32" or len(entry.shape) != 1:
        raise UnsupportedModel(
            f"{header.path}: rope_freqs.weight has type {entry.format} and shape {list(entry.shape)}; expected a vector of F32"
        )
    return tuple(float(x) for x in read_tensor(entry).data.view(np.float32))


def _dtype(header: GgufHeader) -> str:
    """The most common matrix type if it is a plain 16-bit one, else float32."""
    formats = [entry.format for entry in header.entries.values() if len(entry.shape) == 2]
    most = max(sorted(set(formats)), key=formats.count)
    return NOT_QUANTISED.get(most, "float32")


GGUF_NAMES = {
    "embed": "token_embd",
    "layers.{}.attn_norm": "blk.{}.attn_norm",
    "layers.{}.q": "blk.{}.attn_q",
    "layers.{}.k": "blk.{}.attn_k",
    "layers.{}.v": "blk.{}.attn_v",
    "layers.{}.o": "blk.{}.attn_output",
    "layers.{}.mlp_norm": "blk.{}.ffn_norm",
    "layers.{}.gate": "blk.{}.ffn_gate",
    "layers.{}.up": "blk.{}.ffn_up",
    "layers.{}.down": "blk.{}.ffn_down",
    "norm": "output_norm",
    "head": "output",
}
