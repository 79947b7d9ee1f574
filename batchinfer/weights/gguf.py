"""GGUF reader: metadata and tensors. Sizes are checked against the file before anything is allocated or handed on."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchinfer.errors import ModelError, UnsupportedModel
from batchinfer.weights.checkpoint import RawTensor, TensorEntry, fill, open_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_HEADER_BYTES = 256 << 20  # vocabularies of a few hundred thousand tokens take some 20 MiB
MAX_STRINGS = 4 << 20  # in one header; reading more would take longer than a user waits
MAX_DIMS = 4
MAX_ARRAY_DEPTH = 4
CHUNK_ELEMENTS = 1 << 20  # dequantised at a time: bounds the temporaries to a few MiB, which is also fastest
PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bf16"}
SCALARS = {  # GGUF value type -> struct code
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True, eq=False)
class GgufHeader:
    """A file's metadata and tensor table."""

    path: Path
    metadata: Mapping[str, Any]
    entries: Mapping[str, TensorEntry]

    @property
    def architecture(self) -> str:
        """The architecture's name as the file gives it."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str):
            raise ModelError(f"{self.path}: metadata has no general.architecture")
        return value


class GgufCheckpoint:
    """The tensors of one GGUF file, dequantised to float32 as they are read (F16 and BF16 stay as they are)."""

    def __init__(self, path: Path) -> None:
        self.place = path
        self.entries: Mapping[str, TensorEntry] = read_gguf(path).entries

    def can_read(self, entry: TensorEntry) -> bool:
        """True when the gguf package dequantises the tensor's type."""
        return can_dequantise(entry.format)

    def read(self, name: str) -> RawTensor:
        """Read one tensor into memory of its own."""
        return read_tensor(self.entries[name])


def read_tensor(entry: TensorEntry) -> RawTensor:
    """One tensor's values; quantised ones as float32."""
    with open_file(entry.file) as file:
        file.seek(entry.offset)
        if entry.format in PLAIN:
            data = np.empty(entry.num_bytes, np.uint8)
            fill(file, data, entry)
            return RawTensor(entry.name, entry.shape, PLAIN[entry.format], data)
        return RawTensor(entry.name, entry.shape, "float32", _dequantise(file, entry))


def _dequantise(file: Any, entry: TensorEntry) -> NDArray[np.uint8]:
    from gguf import quants
    from gguf.constants import GGMLQuantizationType

    kind = GGMLQuantizationType[entry.format]
    columns = entry.shape[-1]
    rows = entry.num_elements // columns
    row_bytes = entry.num_bytes // rows
    out = np.empty((rows, columns), np.float32)
    step = max(1, CHUNK_ELEMENTS // columns)
    buffer = np.empty((min(step, rows), row_bytes), np.uint8)
    for start in range(0, rows, step):
        part = buffer[: min(step, rows - start)]
        fill(file, part.reshape(-1), entry)
        try:
            out[start : start + len(part)] = quants.dequantize(part, kind)
        except NotImplementedError as err:
            raise UnsupportedModel(f"{entry.file}: tensor {entry.name} has type {entry.format}, which cannot be dequantised yet") from err
    return out.reshape(-1).view(np.uint8)


def can_dequantise(format_name: str) -> bool:
    """True when tensors of this GGUF type can be read."""
    from gguf import quants
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    if format_name in PLAIN:
        return True
    kind = GGMLQuantizationType[format_name]
    block = np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8)
    try:
        with np.errstate(all="ignore"):
            quants.dequantize(block, kind)
    except NotImplementedError:
        return False
    return True


def read_gguf(path: Path) -> GgufHeader:
    """Read metadata and the tensor table; every tensor is checked to lie inside the file."""
    try:
        with open_file(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            cursor = _Cursor(file, path, size)
            return _read_header(cursor)
    except OSError as err:
        raise ModelError(f"{path}: cannot be read: {err.strerror or err}") from err


class _Cursor:
    """Bounds-checked reading of the header, in growing pieces, so that a huge stated length costs nothing."""

    PIECE = 4 << 20

    def __init__(self, file: Any, path: Path, size: int) -> None:
        self.file, self.path, self.size = file, path, size
        self.data = bytearray()
        self.pos = 0
        self.strings = 0

    def need(self, count: int, what: str) -> int:
        """Make `count` bytes available from the current position, step over them, and return where they start."""
        start, end = self.pos, self.pos + count
        if end > self.size:
            raise ModelError(
                f"{self.path}: header ends early: {what} would reach byte {end:,}, but the file has {self.size:,}; truncated or corrupt"
            )
        if end > MAX_HEADER_BYTES:
            raise ModelError(f"{self.path}: header is larger than {MAX_HEADER_BYTES:,} bytes ({what}); corrupt?")
        while end > len(self.data):
            piece = self.file.read(min(max(self.PIECE, end - len(self.data)), self.size - len(self.data)))
            if not piece:
                raise ModelError(f"{self.path}: header ends early ({what}); truncated")
            self.data += piece
        self.pos = end
        return start

    def scalar(self, code: str, what: str) -> Any:
        """One little-endian number."""
        layout = LAYOUTS[code]
        return layout.unpack_from(self.data, self.need(layout.size, what))[0]

    def string(self, what: str) -> str:
        """A length-prefixed UTF-8 string; bytes that are no UTF-8 become U+FFFD."""
        length = self.scalar("Q", what)
        start = self.need(length, what)
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def texts(self, count: int, what: str) -> list[str]:
        """So many strings behind each other: vocabularies have hundreds of thousands."""
        found, length_at = [], LAYOUTS["Q"].unpack_from
        for _ in range(count):
            start = self.pos + 8
            end = start + length_at(self.data, self.pos)[0] if start <= len(self.data) else len(self.data) + 1
            if end > len(self.data):  # more of the file is needed, or it ends here
                found.append(self.string(what))
                continue
            found.append(self.data[start:end].decode("utf-8", errors="replace"))
            self.pos = end
        return found

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        """A metadata value of the stated type; arrays of numbers come as NumPy arrays, so that a long one stays small."""
        if kind == STRING:
            return self.string(what)
        if kind in SCALARS:
            return self.scalar(SCALARS[kind], what)
        if kind != ARRAY or depth >= MAX_ARRAY_DEPTH:
            raise ModelError(f"{self.path}: {what} has unknown metadata type {kind}; corrupt or of a newer format")
        inner, count = self.scalar("I", what), self.scalar("Q", what)
        if inner in SCALARS:
            dtype = np.dtype("<" + SCALARS[inner]) if SCALARS[inner] not in "?bB" else np.dtype(SCALARS[inner])
            start = self.need(count * dtype.itemsize, what)
            return np.frombuffer(self.data, dtype, count, start).copy()
        self.strings += count
        if self.strings > MAX_STRINGS:
            raise ModelError(f"{self.path}: {what} states {count:,} items; more than any vocabulary has; corrupt")
        if inner == STRING:
            return self.texts(count, what)
        return [self.value(inner, what, depth + 1) for _ in range(count)]


LAYOUTS = {code: struct.Struct("<" + code) for code in SCALARS.values()}


def _read_header(cursor: _Cursor) -> GgufHeader:
    path = cursor.path
    if cursor.size < 24:
        raise ModelError(f"{path}: not a GGUF file: only {cursor.size} bytes long")
    start = cursor.need(4, "magic")
    if bytes(cursor.data[start : start + 4]) != MAGIC:
        raise ModelError(f"{path}: not a GGUF file (it does not begin with 'GGUF')")
    version = cursor.scalar("I", "version")
    if version not in VERSIONS:
        big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        detail = "a big-endian file" if big_endian else f"version {version}"
        raise UnsupportedModel(f"{path}: GGUF {detail} is not supported; little-endian versions {VERSIONS[0]} and {VERSIONS[1]} are")
    num_tensors, num_pairs = cursor.scalar("Q", "tensor count"), cursor.scalar("Q", "metadata count")
    if num_tensors * 24 > cursor.size or num_pairs * 13 > cursor.size:
        raise ModelError(
            f"{path}: header states {num_tensors:,} tensors and {num_pairs:,} metadata keys, more than the file can hold; corrupt"
        )
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string("metadata key")
        if key in metadata:
            raise ModelError(f"{path}: metadata key {key} stands twice; corrupt")
        metadata[key] = cursor.value(cursor.scalar("I", key), key)
    table = [_table_row(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise ModelError(f"{path}: general.alignment is {alignment}; must be a power of two")
    base = -(-cursor.pos // alignment) * alignment
    entries: dict[str, TensorEntry] = {}
    for name, shape, kind, offset in table:
        if name in entries:
            raise ModelError(f"{path}: tensor {name} stands twice; corrupt")
        if offset % alignment:
            raise ModelError(f"{path}: tensor {name} starts at {offset:,}, not on the file's alignment of {alignment}; corrupt")
        entries[name] = _entry(path, name, shape, kind, base + offset, cursor.size)
    return GgufHeader(path, metadata, entries)


def _table_row(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string("tensor name")
    where = f"tensor {name[:80]}"
    num_dims = cursor.scalar("I", where)
    if not 1 <= num_dims <= MAX_DIMS:
        raise ModelError(f"{cursor.path}: {where} states {num_dims} dimensions; corrupt")
    dims = [cursor.scalar("Q", where) for _ in range(num_dims)]
    if any(not 0 < n < 2**40 for n in dims) or math.prod(dims) >= 2**50:
        raise ModelError(f"{cursor.path}: {where} states shape {dims}; corrupt")
    return name, tuple(reversed(dims)), cursor.scalar("I", where), cursor.scalar("Q", where)


def _entry(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, size: int) -> TensorEntry:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        ggml_type = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    except (ValueError, KeyError):
        raise UnsupportedModel(f"{path}: tensor {name} has GGUF type {kind}, which the installed gguf package does not know") from None
    if shape[-1] % block:
        raise ModelError(f"{path}: tensor {name} of type {ggml_type.name} has rows of {shape[-1]}, not a multiple of {block}; corrupt")
    num_bytes = math.prod(shape) // block * block_bytes
    if offset + num_bytes > size:
        raise ModelError(f"{path}: tensor {name} ends at byte {offset + num_bytes:,}, but the file has {size:,}; the file is truncated")
    return TensorEntry(name, shape, ggml_type.name, path, offset, num_bytes)
