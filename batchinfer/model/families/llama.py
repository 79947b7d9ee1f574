"""The Llama family: Llama 1, 2, 3, 3.1, 3.2, SmolLM2 and whatever else has their shape and key names."""

from __future__ import annotations

from typing import Any

from batchinfer.errors import ModelError
from batchinfer.model.config import Keys, ModelConfig
from batchinfer.model.families.shared_keys import read_dtype, read_rotary, refuse_quantised, refuse_unknown

ARCHITECTURES = ("LlamaForCausalLM",)
GGUF_ARCHITECTURE = "llama"
# GGUF files of this architecture hold q and k rows reordered for interleaved rotary pairs.
GGUF_PERMUTED_QK = True

NAMES = {
    "embed": "model.embed_tokens",
    "layers.{}.attn_norm": "model.layers.{}.input_layernorm",
    "layers.{}.q": "model.layers.{}.self_attn.q_proj",
    "layers.{}.k": "model.layers.{}.self_attn.k_proj",
    "layers.{}.v": "model.layers.{}.self_attn.v_proj",
    "layers.{}.o": "model.layers.{}.self_attn.o_proj",
    "layers.{}.mlp_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.gate": "model.layers.{}.mlp.gate_proj",
    "layers.{}.up": "model.layers.{}.mlp.up_proj",
    "layers.{}.down": "model.layers.{}.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}

# What the architecture's own definition says where a config.json leaves a key out.
DEFAULT_NORM_EPS = 1e-6
DEFAULT_MAX_POSITION = 2048
DEFAULT_THETA = 10_000.0


def config_from_hf(data: dict[str, Any], place: str) -> ModelConfig:
    """The architecture from the keys of a Llama config.json."""
    keys = Keys(data, place)
    refuse_quantised(keys)
    keys.must_be("hidden_act", "silu", "swish")
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    head_dim = keys.try_count("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise ModelError(f"{place}: hidden_size {hidden} does not divide by {heads} attention heads, and no head_dim is given")
        head_dim = hidden // heads
    bias = keys.flag("attention_bias", False)
    config = ModelConfig(
        family="llama",
        vocab_size=keys.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.count("intermediate_size"),
        num_layers=keys.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=keys.try_count("num_key_value_heads") or heads,
        head_dim=head_dim,
        norm_eps=keys.try_number("rms_norm_eps") or DEFAULT_NORM_EPS,
        max_position=keys.try_count("max_position_embeddings") or DEFAULT_MAX_POSITION,
        rotary=read_rotary(keys, head_dim, DEFAULT_THETA),
        attention_bias=bias,
        o_bias=keys.flag("o_bias", bias),
        mlp_bias=keys.flag("mlp_bias", False),
        tied_head=keys.flag("tie_word_embeddings", False),
        attn_scale=head_dim**-0.5,
        dtype=read_dtype(keys),
    )
    refuse_unknown(keys)
    return config
