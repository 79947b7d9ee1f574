"""Prepared weights on the disk, so that a checkpoint is dequantised and quantised once and not at every start.

Kept is what comes before a library's own layouts: 8-bit codes and scales, 4-bit panels, and the bf16 or float32 weights
of a quantised checkpoint. Not kept are weights that a checkpoint holds in the run's own dtype: that would be the whole
checkpoint once more on the disk for a fraction of the time (Llama-3.2-1B in bf16: 1.9 instead of 3.4 s, and 2.5 GB).

Seconds from checkpoint to layouts and from kept weights to layouts, on two cores: SmolLM2-135M as GGUF, bf16 1.3 and
0.36, int8 5.5 and 1.4, int4 4.2 and 0.2; Llama-3.2-1B's sizes in bf16, int8 27.7 and 6.8, int4 25.9 and 1.9. What is
left of int8 is oneDNN's reordering of the codes, whose result no disk can keep.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from batchinfer.layers.kinds import FORMS
from batchinfer.layers.lm_head import slice_widths
from batchinfer.layers.prepared import Prepared
from batchinfer.model.assemble import Piece, Placement
from batchinfer.model.config import ModelConfig
from batchinfer.remembered import processor_facts
from batchinfer.stopwatch import NO_STOPWATCH, Stopwatch
from batchinfer.weights.packed_file import PackedFile, PackedWriter
from batchinfer.weights.packed_shelf import make_room, packed_folder, require_room
from batchinfer.weights.source import ModelFiles, weights_identity

log = logging.getLogger(__name__)

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}  # as safetensors spells them
WORDS = {dtype: word for word, dtype in DTYPES.items()}
MOST_TENSORS = 5  # of a piece
STAGE = "keep the packed weights"
SOURCES = ("layers", "model", "ops", "weights")  # whose code decides what is kept


def place_of(files: ModelFiles, config: ModelConfig, place: Placement, products: Sequence[str]) -> Path:
    """Where the prepared weights of this checkpoint are kept: a name made of all that bears on them.

    `products`: which multiply them here, in words; one kind of linear layer may have several layouts.
    """
    about = [
        weights_identity(files),
        asdict(config),
        [str(place.dtype), str(place.norm_dtype), place.linear.name, *products],
        [torch.__version__, torch.backends.cpu.get_cpu_capability(), np.__version__, _dequantiser(files)],
        processor_facts(),
        _code(),
    ]
    return packed_folder() / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]}.safetensors"


def _dequantiser(files: ModelFiles) -> str:
    return version("gguf") if files.kind == "gguf" else ""


@cache
def _code(package: Path = Path(__file__).parents[1]) -> str:
    """A hash of the code that prepares weights; other code makes other files."""
    digest = hashlib.sha256()
    for name in SOURCES:
        for path in sorted((package / name).rglob("*.py")):
            digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def read_pieces(file: PackedFile) -> Iterator[Piece]:
    """The pieces of a file in the order in which they were prepared. Raises `DamagedFile` where one is not what was written.

    Tensors lie in the mapping. What a layout copies is given back to the system as soon as that layout stands.
    """
    for name, members in _by_piece(file).items():
        form = FORMS[members[0][0]]
        yield name, Prepared(form, {part: _tensor(file, entry) for _, part, entry in members})
        if form.copies:
            for _, _, entry in members:
                file.let_go(entry)


def _by_piece(file: PackedFile) -> dict[str, list[tuple[str, str, str]]]:
    """Name of a piece -> (form, tensor, name in the file) of its tensors."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for entry in file.entries:
        name, form, part = entry.split("/")
        found.setdefault(name, []).append((form, part, entry))
    return found


def _tensor(file: PackedFile, name: str) -> Tensor:
    entry = file.entries[name]
    return torch.from_numpy(file.read(name)).view(DTYPES[entry.format]).view(entry.shape)


def mapped_bytes(file: PackedFile) -> int:
    """Bytes of the tensors that live on in the mapping."""
    return sum(entry.num_bytes for name, entry in file.entries.items() if not FORMS[name.split("/")[1]].copies)


def writing(pieces: Iterable[Piece], keeper: Keeper) -> Iterator[Piece]:
    """The pieces, each written to the keeper's file on its way."""
    try:
        keeper.attempt(keeper.open)
        for name, piece in pieces:
            keeper.attempt(partial(keeper.add, name, piece))
            yield name, piece
        keeper.attempt(keeper.finish)
    finally:
        keeper.drop()


class Keeper:
    """Writes pieces to a file at `place` until that fails once, which only costs the next start its time."""

    def __init__(self, place: Path, facts: dict[str, str], config: ModelConfig, num_bytes: int, watch: Stopwatch = NO_STOPWATCH) -> None:
        """`facts`: what the file says of itself; `num_bytes`: what the weights will take, for the room that they need."""
        self._place, self._facts, self._num_bytes, self._watch = place, facts, num_bytes, watch
        self._most_tensors = MOST_TENSORS * (6 * config.num_layers + 2 + len(slice_widths(config.vocab_size)))
        self._writer: PackedWriter | None = None

    def attempt(self, write: Callable[[], None]) -> None:
        """Do it; a disk that refuses ends the keeping, aloud."""
        try:
            with self._watch.stage(STAGE):
                write()
        except OSError as err:
            log.warning("packed weights are not kept, so that the next start packs again: %s", err)
            self._watch.say(STAGE, "refused")
            self.drop()

    def open(self) -> None:
        """Begin the file, if there is room for it."""
        require_room(self._num_bytes)
        self._writer = PackedWriter(self._place, self._most_tensors)

    def add(self, name: str, piece: Prepared) -> None:
        """Write a piece."""
        if self._writer is None:
            return
        for part, tensor in piece.tensors.items():
            flat = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            self._writer.add(f"{name}/{piece.form.name}/{part}", WORDS[tensor.dtype], tuple(tensor.shape), flat)

    def finish(self) -> None:
        """Put the file in its place, and older ones out of its way."""
        if self._writer is None:
            return
        make_room(self._writer.num_bytes)
        self._writer.finish(self._facts)
        self._watch.say(STAGE, f"{self._writer.num_bytes / 1e6:,.0f} MB for the next start")

    def drop(self) -> None:
        """Delete what is not in its place."""
        if self._writer is not None:
            self._writer.drop()
            self._writer = None
