"""A checkpoint's formats, whatever kind of file it is."""

from __future__ import annotations

from collections.abc import Iterable

from batchinfer.weights.checkpoint import Checkpoint, TensorEntry
from batchinfer.weights.gguf import GgufCheckpoint
from batchinfer.weights.safetensors import SafetensorsCheckpoint
from batchinfer.weights.source import ModelFiles


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """The reader for a model's files; only headers are read."""
    return GgufCheckpoint(files.path) if files.kind == "gguf" else SafetensorsCheckpoint(files.path)


def bytes_by_format(entries: Iterable[TensorEntry]) -> dict[str, str]:
    """How many tensors and bytes stand in each format."""
    found: dict[str, list[int]] = {}
    for entry in entries:
        found.setdefault(entry.format, []).append(entry.num_bytes)
    return {word: f"{len(sizes)} tensors, {sum(sizes) / 1e6:,.1f} MB" for word, sizes in sorted(found.items())}


def count_parameters(entries: Iterable[TensorEntry]) -> int:
    """Number of weights."""
    return sum(entry.num_elements for entry in entries)
