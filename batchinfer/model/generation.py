"""What a checkpoint says about generating: EOS ids from every place, sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchinfer.core.request import ALIASES, SamplingParams
from batchinfer.errors import InputError, ModelError
from batchinfer.weights.gguf import GgufHeader, read_gguf
from batchinfer.weights.json_file import read_json
from batchinfer.weights.source import ModelFiles, read_json_if_there

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
NOISE_KEYS = ("temperature", "top_p", "top_k", "min_p")  # say nothing under greedy decoding
GGUF_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# End-of-turn tokens by name: in a GGUF file that does not state its eot id, the one that its own chat template writes.
GGUF_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>")
CONTROL = 3  # GGUF token type


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """EOS ids (config.json, generation_config.json, GGUF metadata), and sampling defaults under `SamplingParams` names.

    `notes` are sentences for the user about what the checkpoint asks for and this version does not do.
    """

    eos_ids: tuple[int, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_generation_config(files: ModelFiles, header: GgufHeader | None = None) -> GenerationConfig:
    """The checkpoint's own generation settings. `header`: of the GGUF file, where it was read."""
    if files.kind == "gguf":
        return GenerationConfig(gguf_eos_ids(header or read_gguf(files.path)))
    place = files.path / "generation_config.json"
    generation = read_json_if_there(place)
    config = read_json(files.path / "config.json")
    ids = eos_list(config.get("eos_token_id"), files.path / "config.json") + eos_list(generation.get("eos_token_id"), place)
    defaults, notes = _sampling_defaults(generation, str(place))
    return GenerationConfig(tuple(dict.fromkeys(ids)), defaults, notes)


def eos_list(value: Any, place: Any) -> list[int]:
    """Token ids from an int, a list of ints, or null."""
    items = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        raise ModelError(f"{place}: eos_token_id is {str(value)[:80]}; must be a token id or a list of them")
    return [item for item in items if item >= 0]  # -1 is written for "none"


def gguf_eos_ids(header: GgufHeader) -> tuple[int, ...]:
    """The ids that end a text: stated ones, and the end-of-turn token that the file's own chat template writes."""
    metadata = header.metadata
    ids: list[int] = []
    for key in GGUF_EOS_KEYS:
        ids += eos_list(metadata.get(key), header.path)
    template = metadata.get("tokenizer.chat_template")
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(template, str) and isinstance(tokens, list) and types is not None:
        for name in GGUF_TURN_ENDS:
            if name in template and name in tokens:
                index = tokens.index(name)
                if list(types[index : index + 1]) == [CONTROL]:
                    ids.append(index)
    return tuple(dict.fromkeys(ids))


def _sampling_defaults(generation: Mapping[str, Any], place: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    greedy = generation.get("do_sample") is False
    defaults: dict[str, Any] = {"temperature": 0.0} if greedy else {}
    notes: list[str] = []
    for key in SAMPLING_KEYS:
        value = generation.get(key)
        if value is None or (greedy and key in NOISE_KEYS):
            continue
        name = ALIASES.get(key, key)
        try:
            SamplingParams().updated({name: value})
        except InputError as err:
            raise ModelError(f"{place}: {err}") from err
        defaults[name] = value
    return defaults, tuple(notes)
