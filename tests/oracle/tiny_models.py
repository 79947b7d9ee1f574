"""Tiny random Llama-family checkpoints, written as a hub would publish them: small enough for a test, shaped like the real ones.

    folder = write_tiny(tmp_path / "m", "llama3.2")            # config.json, safetensors, tokenizer.json, generation_config.json
    path = write_gguf(folder, tmp_path / "m.gguf")             # the same model as float32 GGUF

Weights are float32 and drawn from a seed. They are large (standard deviation 0.2), so that the greedy text depends on the whole
context and the best logit is well ahead of the second: a wrong mask, position or head mapping shows in the first few tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM

WEIGHT_STD = 0.2

# GPT-2's first merges: enough that real words are more than one byte a token.
# fmt: off
MERGES = [
    "Ġ t", "h e", "Ġ a", "i n", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "Ġ w", "Ġ o", "e n", "Ġ c",
    "i t", "i s", "a n", "o r", "e s", "Ġ b", "e d", "Ġ f", "in g", "Ġ p", "o u", "Ġa n", "a l", "a r",
    "Ġt o", "Ġ m", "Ġo f", "Ġ in", "Ġ d", "Ġ h", "Ġan d", "i c", "a s", "l e", "Ġt h", "i on", "o m",
]
# fmt: on
END_OF_TEXT, IM_START, IM_END = SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(MERGES) + len(SPECIALS)
END_OF_TEXT_ID, IM_START_ID, IM_END_ID = range(VOCAB_SIZE - 3, VOCAB_SIZE)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_PLAIN = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": END_OF_TEXT_ID,
    "eos_token_id": IM_END_ID,
    "pad_token_id": END_OF_TEXT_ID,
}

# An original context of 64 puts a rotary wavelength in each of the three bands of the llama3 rule: kept, blended, stretched.
_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

SHAPES: dict[str, dict[str, Any]] = {
    "llama1": {"rms_norm_eps": 1e-6},
    "llama2": {"num_hidden_layers": 3, "num_key_value_heads": 2},
    "llama3": {"num_attention_heads": 8, "num_key_value_heads": 2, "rope_theta": 500000.0},
    "llama3.2": {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3_SCALING,
        "tie_word_embeddings": True,
    },
    "smollm2": {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "head_dim": {"num_key_value_heads": 2, "head_dim": 32},
    "biases": {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
}


def write_tiny(
    folder: Path, shape: str = "llama2", *, seed: int = 0, max_shard_size: str = "1GB", old_keys: bool = False, add_bos: bool = False
) -> Path:
    """Write a random checkpoint of one of SHAPES into the folder and return it.

    `max_shard_size="100KB"` writes several safetensors files and their index; `old_keys` spells config.json as checkpoints before
    transformers 5 do (`rope_theta`, `rope_scaling`, `torch_dtype`); `add_bos` gives the tokenizer a begin token, as Llama's have.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = _random_model(LlamaConfig(**{**_PLAIN, **SHAPES[shape]}), seed)
    # Two end tokens, one of them in generation_config.json alone: Llama 3 is published so.
    model.generation_config.eos_token_id = [IM_END_ID, END_OF_TEXT_ID]
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(_spelled(config, SHAPES[shape], old_keys), indent=2) + "\n")
    build_tokenizer(add_bos).save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    return folder


def _random_model(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):  # sorted: the draw must not depend on the order of registration
            if "norm" in name:
                weight.uniform_(0.5, 1.5, generator=draw)
            else:
                weight.normal_(0.0, WEIGHT_STD, generator=draw)
    return model


def _spelled(config: dict[str, Any], shape: dict[str, Any], old_keys: bool) -> dict[str, Any]:
    """Spell the rotary settings and the dtype in the old or the new way, whatever this transformers writes."""
    theta, scaling = shape.get("rope_theta", _PLAIN["rope_theta"]), shape.get("rope_scaling")
    drop = {"rope_parameters", "rope_theta", "rope_scaling", "dtype", "torch_dtype"}
    rest = {key: value for key, value in config.items() if key not in drop}
    if old_keys:
        return {**rest, "torch_dtype": "float32", "rope_theta": theta, "rope_scaling": scaling}
    return {**rest, "dtype": "float32", "rope_parameters": {"rope_theta": theta, **(scaling or {"rope_type": "default"})}}


def build_tokenizer(add_bos: bool = False) -> Tokenizer:
    """Build a byte-level BPE tokenizer: 256 bytes, a few merges, three special tokens."""
    tokens = [*_byte_tokens(), *(merge.replace(" ", "") for merge in MERGES)]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{END_OF_TEXT} $A", pair=f"{END_OF_TEXT} $A $B", special_tokens=[(END_OF_TEXT, END_OF_TEXT_ID)]
        )
    return tokenizer


def _byte_tokens() -> list[str]:
    """Return GPT-2's printable stand-in for each byte, in byte order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (chr(256 + n) for n in range(256))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: Path, path: Path) -> Path:
    """Write the folder's model and tokenizer as one float32 GGUF file, with q and k rows in GGUF's interleaved rotary order."""
    config = json.loads((folder / "config.json").read_text())
    rotary = config.get("rope_parameters") or {"rope_theta": config["rope_theta"], **(config["rope_scaling"] or {})}
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    _add_config(writer, config, rotary["rope_theta"])
    _add_tokenizer(writer, folder)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for shard in sorted(folder.glob("*.safetensors")):
        for name, weight in load_file(shard).items():
            stem, kind = name.rsplit(".", 1)
            block, part = _gguf_name(stem)
            permuted = _permuted(weight, heads[part]) if part in heads else weight
            writer.add_tensor(f"{block}{part}.{kind}", np.ascontiguousarray(permuted))
    if rotary.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _frequency_divisors(rotary, config["head_dim"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(stem: str) -> tuple[str, str]:
    """Split a Hugging Face tensor name into GGUF's block prefix and part: `model.layers.1.mlp.up_proj` is `blk.1.` and `ffn_up`."""
    if stem.startswith("model.layers."):
        _, _, number, part = stem.split(".", 3)
        return f"blk.{number}.", _GGUF_NAMES[part]
    return "", _GGUF_NAMES[stem]


def _permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows so that the two halves of a head, which rotate together, stand side by side."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _frequency_divisors(rotary: dict[str, Any], head_dim: int) -> np.ndarray:
    """Return by what the llama3 rule divides each rotary frequency: GGUF stores that, not the rule's four numbers."""
    frequencies = 1.0 / rotary["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    turns = rotary["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rotary["low_freq_factor"], rotary["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - kept) / rotary["factor"] + kept)).astype(np.float32)


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any], rope_theta: float) -> None:
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope_theta)
    writer.add_rope_dimension_count(config["head_dim"])
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    written = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = {**written["model"]["vocab"], **{token["content"]: token["id"] for token in written["added_tokens"]}}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    types = [gguf.TokenType.CONTROL if token in SPECIALS else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(END_OF_TEXT_ID)
    writer.add_eos_token_id(IM_END_ID)
    writer.add_pad_token_id(END_OF_TEXT_ID)
    writer.add_add_bos_token(written["post_processor"] is not None)
    writer.add_chat_template(CHAT_TEMPLATE)
