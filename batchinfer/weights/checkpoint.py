"""What every weight reader offers: the headers as records, and one tensor's bytes at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from batchinfer.errors import ModelError


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as the file's header states it: checked to lie inside the file, not yet read.

    `shape` is in the usual row-major order, [out, in] for matrices. `format` is the file's own word (`BF16`, `Q4_1`).
    """

    name: str
    shape: tuple[int, ...]
    format: str
    file: Path
    offset: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """One tensor's values in memory of their own.

    `data` is a flat byte array; `dtype` says how to read it: `bf16`, `float16` or `float32`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: NDArray[np.uint8]


class Checkpoint(Protocol):
    """A set of weights on disk."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Every tensor by its name in the file."""

    @property
    def place(self) -> Path:
        """The folder or file, for messages."""

    def can_read(self, entry: TensorEntry) -> bool:
        """True when the tensor's format is one that this version understands."""

    def read(self, name: str) -> RawTensor:
        """Read one tensor into memory of its own."""


def open_file(path: Path) -> FileIO:
    """Open for reading, unbuffered; a missing file or dangling link is a `ModelError` that says so."""
    if not path.exists():
        if path.is_symlink():
            raise ModelError(f"{path}: missing file: the link points to {path.readlink()}, which does not exist; fetch the model again")
        raise ModelError(f"{path}: missing file; the download may have been interrupted: fetch the model again")
    try:
        return path.open("rb", buffering=0)
    except OSError as err:
        raise ModelError(f"{path}: cannot be read: {err.strerror or err}") from err


def fill(file: FileIO, data: NDArray[np.uint8], entry: TensorEntry) -> None:
    """Read `data` full from the file's position; one read call stops at 2 GiB, so several may be needed."""
    done = 0
    while done < data.nbytes:
        count = file.readinto(data[done:].data)
        if not count:
            raise ModelError(f"{entry.file}: ends inside tensor {entry.name}; the file changed or is truncated")
        done += count
