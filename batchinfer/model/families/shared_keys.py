"""Reading of the config keys that every family spells alike: dtype, rotary, quantisation, and what is left over."""

from __future__ import annotations

import logging
import re
from typing import Any

from batchinfer.errors import ModelError, UnsupportedModel
from batchinfer.model.config import Keys, Llama3Scaling, RotarySpec

log = logging.getLogger(__name__)

DTYPES = {"bfloat16": "bf16", "float16": "float16", "float32": "float32"}
ROPE_TYPES = ("default", "linear", "llama3")

# Keys that say nothing about the result of a forward pass at inference.
# fmt: off
HARMLESS = frozenset((
    "_name_or_path", "architectures", "auto_map", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id",
    "unk_token_id", "sep_token_id", "initializer_range", "model_type", "pretraining_tp", "transformers_version", "use_cache",
    "torch_dtype", "dtype", "max_sequence_length", "model_max_length", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "hidden_dropout", "attention_probs_dropout_prob", "output_attentions", "output_hidden_states", "return_dict",
    "use_return_dict", "name_or_path", "_attn_implementation", "attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
    "_flash_attn_2_enabled", "use_flash_attention",
    "is_llama_config", "unsloth_version", "unsloth_fixed", "transformers.js_config", "id2label", "label2id", "num_labels",
    "problem_type", "finetuning_task", "tokenizer_class", "torchscript", "gradient_checkpointing", "chunk_size_feed_forward",
    "classifier_dropout", "task_specific_params", "use_flash_attn",
    # how to generate, in files of old: generation_config.json is what counts
    "num_beams", "num_beam_groups", "num_return_sequences", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "max_length", "min_length",
    "do_sample", "early_stopping", "diversity_penalty", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "decoder_start_token_id", "prefix",
    "return_dict_in_generate", "output_scores", "use_bfloat16", "tf_legacy_loss",
))
# fmt: on
# Keys that other models of the same shape carry, with the values that mean "not used".
INACTIVE: dict[str, tuple[Any, ...]] = {
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1, 1.0),
    "rotary_dim": (),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logits_scaling": (1, 1.0),
    "logit_scale": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "attention_multiplier": (),
    "qk_norm": (False,),
    "use_qk_norm": (False,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "is_decoder": (True, False),  # written by old versions; decoders run causally either way
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "use_bidirectional_attention": (False,),
    "pruned_heads": ({},),
    "tie_encoder_decoder": (False,),
    "cross_attention_hidden_size": (),
}
# An unknown key of such a name is taken to change the result.
TELLING = re.compile(
    r"scal|multipl|softcap|window|norm|rope|rotary|bias|expert|moe|attn|attention|layer|head|emb|resid|alibi|act|quant|lora|mlp|ffn|cap|posit|dim|size|num_|proj|mask|cross|mtp"
)


def read_dtype(keys: Keys) -> str:
    """The checkpoint's own dtype, under its old or new key; float32 where neither is given, as the format defines."""
    for key in ("dtype", "torch_dtype"):
        value = keys.try_value(key)
        if value is None:
            continue
        word = str(value).removeprefix("torch.")
        if word not in DTYPES:
            raise UnsupportedModel(f"{keys.place}: {key}={value!r} is not supported; supported: {', '.join(DTYPES)}")
        return DTYPES[word]
    return "float32"


def read_rotary(keys: Keys, head_dim: int, default_theta: float) -> RotarySpec:
    """Rotary settings from `rope_theta` with `rope_scaling`, or from the newer `rope_parameters`."""
    theta = keys.try_number("rope_theta")
    given: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = keys.try_value(key)
        if value is not None and not isinstance(value, dict):
            raise ModelError(f"{keys.place}: {key} must be an object, got {type(value).__name__}")
        given |= value or {}
    factors = keys.try_value("gguf.rope_freqs")
    rope = Keys(given, f"{keys.place}: rope_parameters" if keys.try_value("rope_parameters") else f"{keys.place}: rope_scaling")
    theta = rope.try_number("rope_theta") or theta or default_theta
    rope.must_be("partial_rotary_factor", 1, 1.0)
    kind = rope.try_value("rope_type") or rope.try_value("type") or "default"
    rope.seen |= {"type", "rope_type"}
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(f"{rope.place}: type {kind!r} is not supported by this version; supported: {', '.join(ROPE_TYPES)}")
    scaling = None
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position=rope.try_count("original_max_position_embeddings") or keys.count("max_position_embeddings"),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise ModelError(f"{rope.place}: high_freq_factor must be above low_freq_factor")
    elif kind == "linear":
        factors = (rope.number("factor"),) * (head_dim // 2)
    left = sorted(key for key, value in given.items() if key not in rope.seen and value is not None)
    if left and kind != "default":
        raise UnsupportedModel(f"{rope.place}: unknown key {left[0]!r} for type {kind}")
    return RotarySpec(theta, scaling, factors)


def refuse_quantised(keys: Keys) -> None:
    """Refuse quantised checkpoint formats by name."""
    for key in ("quantization_config", "compression_config", "quantization"):
        value = keys.try_value(key)
        if value:
            method = value.get("quant_method", value.get("quantization_type", "unknown")) if isinstance(value, dict) else value
            raise UnsupportedModel(
                f"{keys.place}: quantised checkpoint format {str(method)!r} ({key}) is not supported by this version; "
                "use the unquantised safetensors or a GGUF file of the model"
            )


def refuse_unknown(keys: Keys) -> None:
    """Refuse keys that nobody has read and that would change the result; mention the others in the log."""
    for key, allowed in INACTIVE.items():
        keys.must_be(key, *allowed)
    for key, value in keys.data.items():
        if key in keys.seen or key in HARMLESS or value is None or value is False or value in ([], {}):
            continue
        if key == "layer_types" and isinstance(value, list) and set(map(str, value)) == {"full_attention"}:
            continue
        if TELLING.search(key):
            raise UnsupportedModel(
                f"{keys.place}: unknown key {key!r} ({str(value)[:60]}) may change what the model computes; "
                "this version does not know how. Remove it from the file if it is only a note"
            )
        log.warning("%s: key %r is not known and not used", keys.place, key)
