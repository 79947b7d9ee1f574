"""Checkpoint tensors under canonical names, streamed: judged whole from the headers, then read one at a time."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from batchinfer.errors import UnsupportedModel, WeightMismatch
from batchinfer.model.config import ModelConfig
from batchinfer.model.families import BY_NAME
from batchinfer.model.gguf_config import GGUF_NAMES
from batchinfer.weights.checkpoint import Checkpoint, RawTensor
from batchinfer.weights.formats import open_checkpoint
from batchinfer.weights.source import ModelFiles

log = logging.getLogger(__name__)

TORCH_DTYPES = {"bf16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LAYER = re.compile(r"^layers\.(\d+)\.")
MAX_NAMED = 6  # tensors named in a message


@dataclass(frozen=True, slots=True)
class Source:
    """Where one canonical tensor comes from; `heads` > 0 when its rows are permuted for interleaved rotary."""

    name: str
    heads: int = 0


def iter_weights(files: ModelFiles, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the model once, under its canonical name, layer by layer.

    Missing, surplus, misshapen and unreadable tensors are refused from the headers, before anything is yielded.
    Each tensor has memory of its own and is not kept here. Quantised GGUF tensors come as float32.
    """
    checkpoint, sources = _plan(files, config)
    return _stream(checkpoint, sources)


def _plan(files: ModelFiles, config: ModelConfig) -> tuple[Checkpoint, dict[str, Source]]:
    family = BY_NAME[config.family]
    checkpoint = open_checkpoint(files)
    if files.kind == "gguf":
        sources = _sources(config, GGUF_NAMES, family.gguf_permuted_qk)
    else:
        sources = _sources(config, family.names, permuted=False)
    _check(checkpoint, config, sources)
    return checkpoint, sources


def _stream(checkpoint: Checkpoint, sources: Mapping[str, Source]) -> Iterator[tuple[str, torch.Tensor]]:
    for canonical, source in sources.items():
        tensor = _to_torch(checkpoint.read(source.name))
        yield canonical, _unpermute(tensor, source.heads) if source.heads else tensor


def _sources(config: ModelConfig, names: Mapping[str, str], permuted: bool) -> dict[str, Source]:
    """Canonical name -> the checkpoint's name."""
    heads = {"q": config.num_heads, "k": config.num_kv_heads} if permuted else {}
    sources = {}
    for canonical in config.tensor_shapes():
        stem, kind = canonical.rsplit(".", 1)
        match = LAYER.match(canonical)
        layer = match.group(1) if match else ""
        pattern = names[LAYER.sub("layers.{}.", stem + ".").removesuffix(".")]
        sources[canonical] = Source(f"{pattern.format(layer)}.{kind}", heads.get(stem.rsplit(".", 1)[-1], 0))
    return sources


def _check(checkpoint: Checkpoint, config: ModelConfig, sources: Mapping[str, Source]) -> None:
    shapes, entries = config.tensor_shapes(), checkpoint.entries
    missing = [source.name for source in sources.values() if source.name not in entries]
    if missing:
        raise WeightMismatch(
            f"{checkpoint.place}: {_list(missing, 'tensor')} missing; the checkpoint is incomplete, or config.json describes another model"
        )
    for canonical, source in sources.items():
        entry = entries[source.name]
        if entry.shape != shapes[canonical]:
            raise WeightMismatch(
                f"{entry.file}: tensor {entry.name} has shape {list(entry.shape)}; the configuration asks for {list(shapes[canonical])}"
            )
        if not checkpoint.can_read(entry):
            raise UnsupportedModel(f"{entry.file}: tensor {entry.name} has type {entry.format}, which this version cannot read")
    wanted = {source.name for source in sources.values()}
    surplus = [name for name in entries if name not in wanted]
    harmless = [name for name in surplus if _is_harmless(name, config)]
    for name in harmless:
        log.warning("%s: tensor %s is not used", entries[name].file, name)
    surplus = [name for name in surplus if name not in set(harmless) and name != "rope_freqs.weight"]
    if surplus:
        raise WeightMismatch(
            f"{entries[surplus[0]].file}: {_list(surplus, 'tensor')} that the {config.family} architecture has no place for"
        )


def _is_harmless(name: str, config: ModelConfig) -> bool:
    """Tables that old versions saved though they are computed, and a head that tied embeddings replace."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tied_head)


def _list(names: list[str], what: str) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{what}{'s' if len(names) > 1 else ''} {', '.join(names[:MAX_NAMED])}{more}"


def _to_torch(raw: RawTensor) -> torch.Tensor:
    return torch.from_numpy(raw.data).view(TORCH_DTYPES[raw.dtype]).view(raw.shape)


def _unpermute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows back from interleaved rotary pairs to two halves a head."""
    rows = tensor.shape[0]
    return tensor.view(heads, rows // heads // 2, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
