"""Loading: the streamed tensors are the checkpoint's, complete or refused, and compute what transformers computes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from batchinfer.errors import UnsupportedModel, WeightMismatch
from batchinfer.model.config import ModelConfig, read_model_config
from batchinfer.model.families import llama
from batchinfer.model.load import iter_weights
from batchinfer.weights.source import resolve_model
from tests.oracle.tiny_models import SHAPES, write_gguf, write_tiny

IDS = torch.tensor([[3, 40, 65, 65, 200, 7, 299, 12, 90, 1, 250, 33]])


def load(path: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    files = resolve_model(str(path))
    config = read_model_config(files)
    return config, dict(iter_weights(files, config))


def rotary_table(config: ModelConfig, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rotary.theta**-exponents
    scaling = config.rotary.scaling
    if scaling is not None:
        turns = scaling.original_max_position * frequencies / (2 * torch.pi)
        kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
        frequencies = (1 - kept) * frequencies / scaling.factor + kept * frequencies
    if config.rotary.freq_factors is not None:
        frequencies = frequencies / torch.tensor(config.rotary.freq_factors, dtype=torch.float64)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def plain_logits(config: ModelConfig, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """A decoder written out plainly, in float32."""
    w = {name: tensor.float() for name, tensor in weights.items()}
    cos, sin = rotary_table(config, len(ids))

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.norm_eps) * weight

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ w[name + ".weight"].T
        return y + w[name + ".bias"] if name + ".bias" in w else y

    def heads(x: torch.Tensor, count: int, rotate: bool) -> torch.Tensor:
        x = x.view(len(ids), count, config.head_dim).transpose(0, 1)
        half = config.head_dim // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        x = x * cos + turned * sin if rotate else x
        return x.repeat_interleave(config.num_heads // count, 0)

    x = w["embed.weight"][ids]
    mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)
    for layer in range(config.num_layers):
        p = f"layers.{layer}."
        y = norm(x, w[p + "attn_norm.weight"])
        q, k = heads(linear(y, p + "q"), config.num_heads, True), heads(linear(y, p + "k"), config.num_kv_heads, True)
        v = heads(linear(y, p + "v"), config.num_kv_heads, False)
        attention = torch.softmax(q @ k.transpose(1, 2) * config.attn_scale + mask, -1) @ v
        x = x + linear(attention.transpose(0, 1).reshape(len(ids), -1), p + "o")
        y = norm(x, w[p + "mlp_norm.weight"])
        x = x + linear(torch.nn.functional.silu(linear(y, p + "gate")) * linear(y, p + "up"), p + "down")
    return norm(x, w["norm.weight"]) @ w["embed.weight" if config.tied_head else "head.weight"].T


@pytest.mark.parametrize("shape", SHAPES)
def test_folder_and_gguf_compute_what_transformers_computes(tmp_path: Path, shape: str) -> None:
    folder = write_tiny(tmp_path / "m", shape)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits[0]
    for path in (folder, write_gguf(folder, tmp_path / "m.gguf")):
        config, weights = load(path)
        torch.testing.assert_close(plain_logits(config, weights, IDS[0]), expected, rtol=2e-4, atol=2e-4)


def test_gguf_and_folder_hold_the_same_tensors(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m", "biases")
    (_, ours), (_, theirs) = load(folder), load(write_gguf(folder, tmp_path / "m.gguf"))
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_shards_hold_the_same_tensors_as_one_file(tmp_path: Path) -> None:
    one, many = write_tiny(tmp_path / "one", "llama3"), write_tiny(tmp_path / "many", "llama3", max_shard_size="60KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    (_, ours), (_, theirs) = load(one), load(many)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_dtypes_of_the_file_are_kept_tensor_by_tensor(tmp_path: Path) -> None:
    def mixed(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(torch.float32 if "norm" in name else torch.bfloat16)

    folder = changed(tmp_path, mixed)
    _, weights = load(folder)
    assert weights["layers.0.q.weight"].dtype == torch.bfloat16
    assert weights["norm.weight"].dtype == torch.float32
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(weights["layers.1.down.weight"], stored["model.layers.1.mlp.down_proj.weight"])


def changed(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], shape: str = "llama2") -> Path:
    folder = write_tiny(tmp_path / "m", shape)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


K, HEAD = "model.layers.1.self_attn.k_proj.weight", "lm_head.weight"


@pytest.mark.parametrize(
    "change,named",
    [
        (lambda t: t.pop(K), f"tensor {K} missing"),
        (lambda t: t.pop(HEAD), f"tensor {HEAD} missing"),
        (lambda t: t.update({K: t[K][:-1]}), rf"model\.safetensors: tensor {K} has shape \[31, 64\].*\[32, 64\]"),
        (lambda t: t.update({K: t[K].flatten()}), f"tensor {K} has shape"),
        (lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}), r"q_norm\.weight that the llama architecture"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}), r"q_proj\.bias that the llama architecture"),
        (lambda t: t.update({"model.layers.3.input_layernorm.weight": torch.ones(64)}), r"layers\.3\.input_layernorm"),
        (lambda t: [t.pop(n) for n in list(t) if "layers.2" in n], r"and 3 more missing"),
    ],
)
def test_incomplete_or_surplus_checkpoints_are_refused_before_anything_is_read(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], named: str
) -> None:
    files = resolve_model(str(changed(tmp_path, change)))
    config = read_model_config(files)
    with pytest.raises(WeightMismatch, match=named):
        iter_weights(files, config)


def test_quantised_tensors_in_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    files = resolve_model(str(changed(tmp_path, lambda t: t.update({K: t[K].to(torch.int8)}))))
    with pytest.raises(UnsupportedModel, match=f"tensor {K} has type I8"):
        iter_weights(files, read_model_config(files))


def test_known_harmless_tensors_are_mentioned_and_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), HEAD: torch.full((300, 64), 9.0)}
    with caplog.at_level(logging.WARNING):
        config, weights = load(changed(tmp_path, lambda t: t.update(extra), shape="llama3.2"))
    assert "head.weight" not in weights
    assert config.tied_head
    assert "inv_freq is not used" in caplog.text
    assert "lm_head.weight is not used" in caplog.text


def test_gguf_surplus_and_missing_are_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m", "llama2")
    path = write_gguf(folder, tmp_path / "m.gguf")
    files = resolve_model(str(path))
    config = read_model_config(files)
    with pytest.raises(WeightMismatch, match=r"blk\.3\.attn_norm\.weight, .* missing"):
        iter_weights(files, replace(config, num_layers=4))
    with pytest.raises(WeightMismatch, match=r"blk\.2\..* no place for"):
        iter_weights(files, replace(config, num_layers=2))


def test_quantised_gguf_equals_the_reference_rows_unpermuted(tmp_path: Path) -> None:
    """Q8_0 rows of q: the permutation is undone on whole rows, after dequantising."""
    folder = write_tiny(tmp_path / "m", "llama2")
    source = gguf.GGUFReader(write_gguf(folder, tmp_path / "plain.gguf"))
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    for key, field in source.fields.items():
        if key.startswith("llama.") and field.types[0] in (gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32):
            value = field.contents()
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    for tensor in source.tensors:
        if len(tensor.shape) == 2:
            data = gguf.quants.quantize(np.array(tensor.data), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(tensor.name, data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (_, exact), (config, rounded) = load(folder), load(tmp_path / "q.gguf")
    assert config.dtype == "float32"
    for name, tensor in exact.items():
        assert rounded[name].dtype == torch.float32
        assert (rounded[name] - tensor).abs().max() < 0.01, name


def test_tensors_are_independent_of_the_reader(tmp_path: Path) -> None:
    """Writing into a yielded tensor changes neither the file nor a second pass."""
    folder = write_tiny(tmp_path / "m", "llama2")
    files = resolve_model(str(folder))
    config = read_model_config(files)
    for _, tensor in iter_weights(files, config):
        tensor.zero_()
    assert all(tensor.abs().max() > 0 for _, tensor in iter_weights(files, config))


def test_every_canonical_name_has_a_checkpoint_name() -> None:
    assert {name.split(".")[-1] for name in llama.NAMES} >= {"embed", "q", "k", "v", "o", "gate", "up", "down", "norm", "head"}
