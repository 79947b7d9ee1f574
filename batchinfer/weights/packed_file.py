"""Files of packed weights: safetensors whose tensors start at multiples of 64 bytes, with sums that show damage.

They are this tool's own copies, written under another name and renamed, and never written again: so, unlike checkpoints,
they are mapped into memory. A file that is deleted meanwhile lives on until the last mapping goes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchinfer.errors import ModelError
from batchinfer.weights.checkpoint import TensorEntry, open_file
from batchinfer.weights.safetensors import read_header

ALIGNMENT = 64  # of every tensor in the file: a vector of the widest registers
SUMMED = 1024  # words of 8 bytes that are added up before the sums are hashed: as quick as reading
ENTRY_ROOM = 400  # bytes of the header for a tensor, its padding and its sum
BASE_ROOM = 8192  # and for the rest
PADDING = "padding."
SCRATCH = ".tmp"  # how files end that are not whole yet
YOUNG_S = 60  # in which a writer has locked its file


class DamagedFile(ModelError):
    """A file of packed weights that is not what was written."""


class PackedWriter:
    """Writes a file tensor by tensor beside its place; it appears whole or not at all."""

    def __init__(self, place: Path, num_tensors: int) -> None:
        """Room in the header is for at most `num_tensors`."""
        self._place = place
        self._room = -(-(BASE_ROOM + ENTRY_ROOM * num_tensors) // ALIGNMENT) * ALIGNMENT
        self._header: dict[str, Any] = {}
        self._sums: dict[str, str] = {}
        place.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = place.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}{SCRATCH}")
        self._file = self._scratch.open("xb")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._file.seek(self._room)
        self._at = 0

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> None:
        """Write a tensor: its flat bytes, and the word that safetensors has for its dtype."""
        self._sums[name] = checksum(data)
        self._put(name, dtype, list(shape), data)
        pad = -len(data) % ALIGNMENT
        if pad:
            self._put(f"{PADDING}{name}", "U8", [pad], np.zeros(pad, np.uint8))

    def _put(self, name: str, dtype: str, shape: list[int], data: NDArray[np.uint8]) -> None:
        self._header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [self._at, self._at + len(data)]}
        self._file.write(data.data)
        self._at += len(data)

    def finish(self, facts: Mapping[str, str]) -> None:
        """Write the header with `facts`, and put the file in its place."""
        metadata = {**facts, "sums": json.dumps(self._sums)}
        metadata["header"] = _header_sum(metadata, self._header)
        header = json.dumps({"__metadata__": metadata, **self._header}).encode()
        if len(header) > self._room - 8:
            raise OSError(f"{self._scratch}: {len(header):,} bytes of header do not fit into {self._room:,}")
        self._file.seek(0)
        self._file.write((self._room - 8).to_bytes(8, "little") + header.ljust(self._room - 8))
        self._file.close()
        self._scratch.replace(self._place)

    @property
    def num_bytes(self) -> int:
        """Bytes of the file as it is so far."""
        return self._room + self._at

    def drop(self) -> None:
        """Close and delete what was written so far; nothing after `finish`."""
        with suppress(OSError):  # a full disk refuses what is still to be written
            self._file.close()
        with suppress(OSError):
            self._scratch.unlink(missing_ok=True)


def is_abandoned(scratch: Path) -> bool:
    """True for an unfinished file whose writer was killed: nobody holds its lock."""
    try:
        if time.time() - scratch.stat().st_mtime < YOUNG_S:
            return False
        with scratch.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class PackedFile:
    """A file of packed weights, mapped. Raises `DamagedFile` for one that is not what was written, `OSError` for one that cannot be mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.entries = {name: entry for name, entry in read_header(path).items() if not name.startswith(PADDING)}
            self.facts, header = _read_facts(path)
            if self.facts.pop("header") != header:
                raise ValueError("its header is not what was written")
            self._sums: dict[str, str] = json.loads(self.facts.pop("sums"))
        except (ModelError, ValueError, KeyError, TypeError) as err:
            raise DamagedFile(f"{path}: damaged: {err}") from err
        with open_file(path) as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return len(self._map)

    def read(self, name: str) -> NDArray[np.uint8]:
        """A tensor's flat bytes, in the mapping, which lives as long as they do."""
        entry = self.entries[name]
        data = np.frombuffer(self._map, np.uint8, entry.num_bytes, entry.offset)
        if checksum(data) != self._sums[name]:
            raise DamagedFile(f"{self.path}: damaged: tensor {name} is not what was written")
        return data

    def let_go(self, name: str) -> None:
        """Give back the pages of a tensor that was read and is not needed soon; what is read of it again is still there."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        first, end = _whole_pages(self.entries[name])
        if end > first:
            with suppress(OSError):
                self._map.madvise(mmap.MADV_DONTNEED, first, end - first)


def checksum(data: NDArray[np.uint8]) -> str:
    """A short hash of a tensor's bytes: of their sums, 8 KiB each, so that it costs no more than reading them."""
    whole = len(data) // (8 * SUMMED) * 8 * SUMMED
    words = data[:whole].view(np.int64).reshape(-1, SUMMED)
    digest = hashlib.sha256(np.add.reduce(words, axis=1).tobytes())
    digest.update(data[whole:].tobytes())
    return digest.hexdigest()[:16]


def _whole_pages(entry: TensorEntry) -> tuple[int, int]:
    page = mmap.PAGESIZE
    return -(-entry.offset // page) * page, (entry.offset + entry.num_bytes) // page * page


def _read_facts(path: Path) -> tuple[dict[str, str], str]:
    """The facts in a file's header, and the sum of all the rest of it."""
    with open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    facts: dict[str, str] = header.pop("__metadata__")
    return facts, _header_sum({name: value for name, value in facts.items() if name != "header"}, header)


def _header_sum(facts: Mapping[str, str], tensors: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps([facts, tensors]).encode()).hexdigest()
