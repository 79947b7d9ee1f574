"""Configurations: every spelling gives the same architecture; what would change the result unseen is refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from batchinfer.errors import ModelError, UnsupportedModel
from batchinfer.model.config import Llama3Scaling, ModelConfig, read_model_config
from batchinfer.model.generation import read_generation_config
from batchinfer.weights.source import ModelFiles, resolve_model
from tests.oracle.tiny_models import SHAPES, write_gguf, write_tiny

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def config_of(folder: Path, **changes: Any) -> ModelConfig:
    data = {key: value for key, value in {**PLAIN, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(data))
    return read_model_config(ModelFiles("m", "folder", folder))


def test_plain_values_and_derived_head_dim(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert (config.vocab_size, config.hidden_size, config.num_layers, config.num_kv_heads, config.head_dim) == (64, 32, 2, 2, 8)
    assert (config.rotary.theta, config.rotary.scaling, config.rotary.freq_factors) == (10000.0, None, None)
    assert (config.attn_scale, config.dtype, config.max_position) == (8**-0.5, "bf16", 256)
    assert (config.attention_bias, config.o_bias, config.mlp_bias, config.tied_head) == (False,) * 4


def test_what_old_files_leave_out(tmp_path: Path) -> None:
    config = config_of(
        tmp_path, num_key_value_heads=..., rope_theta=..., hidden_act=..., torch_dtype=..., tie_word_embeddings=..., architectures=...
    )
    assert (config.num_kv_heads, config.rotary.theta, config.dtype, config.tied_head) == (4, 10000.0, "float32", False)


SCALING = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **SCALING}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **SCALING}},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", **SCALING}},
        {"rope_theta": 500000.0, "rope_parameters": {"rope_type": "llama3", **SCALING}, "rope_scaling": None},
    ],
)
def test_llama3_scaling_in_every_spelling(tmp_path: Path, keys: dict[str, Any]) -> None:
    rotary = config_of(tmp_path, **keys).rotary
    assert rotary.theta == 500000.0
    assert rotary.scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)


def test_linear_scaling_divides_every_frequency(tmp_path: Path) -> None:
    assert config_of(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}).rotary.freq_factors == (2.0,) * 4


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    "word,expected", [("bfloat16", "bf16"), ("float16", "float16"), ("float32", "float32"), ("torch.bfloat16", "bf16")]
)
def test_dtype_under_both_keys(tmp_path: Path, key: str, word: str, expected: str) -> None:
    assert config_of(tmp_path, **{"torch_dtype": ..., key: word}).dtype == expected


@pytest.mark.parametrize("arch", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "LlamaForSequenceClassification"])
def test_other_architectures_are_refused_by_name(tmp_path: Path, arch: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"architecture {arch} .*supported: LlamaForCausalLM"):
        config_of(tmp_path, architectures=[arch])


@pytest.mark.parametrize(
    "changes,named",
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "llama3", **SCALING, "attention_factor": 2.0}}, "attention_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"sliding_window": 128}, "sliding_window=128"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"residual_multiplier": 0.2}, "residual_multiplier=0.2"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"rope_interleaved": True}, "rope_interleaved=True"),
        ({"qk_layernorm": True}, "qk_layernorm"),
        ({"my_logit_scale": 3.0}, "my_logit_scale"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_what_changes_the_result_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        config_of(tmp_path, **changes)


def test_harmless_keys_pass_and_unknown_notes_are_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {
        "_name_or_path": "x",
        "pretraining_tp": 1,
        "attention_dropout": 0.0,
        "sliding_window": None,
        "num_local_experts": 1,
        "rope_interleaved": False,
        "layer_types": ["full_attention"] * 2,
        "_flash_attn_2_enabled": True,
    }
    with caplog.at_level(logging.WARNING):
        config_of(tmp_path, **extra, is_llama_config=True, partial_rotary_factor=1.0)
        assert not caplog.records
        config_of(tmp_path, my_note="hello")
    assert "my_note" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": ...},
        {"hidden_size": "32"},
        {"hidden_size": 0},
        {"hidden_size": -4},
        {"hidden_size": 33},
        {"num_hidden_layers": 2.5},
        {"vocab_size": True},
        {"num_key_value_heads": 3},
        {"head_dim": 7},
        {"rms_norm_eps": "small"},
        {"rope_theta": -1},
        {"rope_scaling": "llama3"},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"attention_bias": 1},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": []},
    ],
)
def test_wrong_values_are_messages_that_name_the_file(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        config_of(tmp_path, **changes)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "\xff"])
def test_broken_config_files_are_messages(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=r"config\.json"):
        read_model_config(ModelFiles("m", "folder", tmp_path))


@pytest.mark.parametrize("shape", SHAPES)
def test_both_spellings_and_gguf_give_one_architecture(tmp_path: Path, shape: str) -> None:
    new = read_model_config(resolve_model(str(write_tiny(tmp_path / "new", shape))))
    old = read_model_config(resolve_model(str(write_tiny(tmp_path / "old", shape, old_keys=True))))
    assert new == old
    of_gguf = read_model_config(resolve_model(str(write_gguf(tmp_path / "new", tmp_path / "m.gguf"))))
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "max_position",
        "tied_head",
    )
    for name in (*sizes, "attention_bias", "o_bias", "mlp_bias", "attn_scale", "dtype"):
        assert getattr(of_gguf, name) == getattr(new, name), name
    assert of_gguf.norm_eps == pytest.approx(new.norm_eps, rel=1e-6)
    assert of_gguf.rotary.theta == new.rotary.theta
    assert (of_gguf.rotary.freq_factors is not None) == (new.rotary.scaling is not None)
    if of_gguf.rotary.freq_factors:  # one head has frequencies that are kept, blended and stretched
        assert len(of_gguf.rotary.freq_factors) == new.head_dim // 2
        assert of_gguf.rotary.freq_factors[0] == 1.0
        assert of_gguf.rotary.freq_factors[-1] == 8.0


def write_metadata(path: Path, arch: str = "llama", **changes: Any) -> ModelFiles:
    writer = gguf.GGUFWriter(path, arch)
    values = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **changes,
    }
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"{arch}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"{arch}.{key}", value)
        elif value is not ...:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((64, 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles("m", "gguf", path)


def test_gguf_metadata(tmp_path: Path) -> None:
    config = read_model_config(write_metadata(tmp_path / "m.gguf"))
    assert (config.vocab_size, config.head_dim, config.tied_head, config.dtype, config.rotary.theta) == (64, 8, True, "float16", 10000.0)
    config = read_model_config(
        write_metadata(tmp_path / "n.gguf", **{"attention.head_count_kv": [4], "rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    )
    assert (config.num_kv_heads, config.rotary.freq_factors) == (4, (4.0,) * 4)


@pytest.mark.parametrize(
    "changes,named",
    [
        ({"expert_count": 8}, "8 experts"),
        ({"attention.head_count_kv": [2, 4]}, "head_count_kv differs from layer to layer"),
        ({"rope.dimension_count": 4}, "rotary embedding over 4 of 8"),
        ({"attention.value_length": 16}, "values of another size"),
        ({"attention.causal": False}, "not causal"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "yarn"),
        ({"attention.sliding_window": 128}, "sliding_window"),
        ({"logit_scale": 0.5}, "logit_scale"),
    ],
)
def test_gguf_metadata_that_changes_the_result_is_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read_model_config(write_metadata(tmp_path / "m.gguf", **changes))


def test_gguf_of_another_architecture_or_without_sizes(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="architecture qwen2 is not supported"):
        read_model_config(write_metadata(tmp_path / "q.gguf", arch="qwen2"))
    with pytest.raises(ModelError, match=r"llama\.block_count"):
        read_model_config(write_metadata(tmp_path / "n.gguf", block_count=...))


@pytest.mark.parametrize(
    "config,generation,expected",
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (2, [5, 2, 7], (2, 5, 7)),
        (None, 5, (5,)),
        (None, None, ()),
        (-1, 5, (5,)),
    ],
)
def test_eos_is_the_union_of_all_places(tmp_path: Path, config: Any, generation: Any, expected: tuple[int, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert read_generation_config(ModelFiles("m", "folder", tmp_path)).eos_ids == expected


def defaults_of(folder: Path, **keys: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text(json.dumps(keys))
    generation = read_generation_config(ModelFiles("m", "folder", folder))
    return dict(generation.defaults), generation.notes


def test_sampling_defaults(tmp_path: Path) -> None:
    assert defaults_of(tmp_path, temperature=0.6, top_p=0.9, top_k=50, max_new_tokens=99, pad_token_id=0, max_length=20)[0] == {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 50,
        "max_tokens": 99,
    }
    assert defaults_of(tmp_path, do_sample=False, temperature=0.6, top_p=0.9, max_new_tokens=7)[0] == {"temperature": 0.0, "max_tokens": 7}
    assert defaults_of(tmp_path, do_sample=True, temperature=None) == ({}, ())
    assert defaults_of(tmp_path, repetition_penalty=1.1) == ({"repetition_penalty": 1.1}, ())
    with pytest.raises(ModelError, match=r"generation_config\.json: temperature"):
        defaults_of(tmp_path, temperature="hot")
    (tmp_path / "config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ModelError, match="eos_token_id"):
        read_generation_config(ModelFiles("m", "folder", tmp_path))
