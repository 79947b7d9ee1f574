"""Safetensors reader: single file or shards with an index; every header is checked before a byte of data is read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

from batchinfer.errors import ModelError, UnsupportedModel, WeightMismatch
from batchinfer.weights.checkpoint import RawTensor, TensorEntry, fill, open_file
from batchinfer.weights.json_file import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 << 20  # the format's own limit
MAX_INDEX_BYTES = 256 << 20
MAX_DIMS = 8
DTYPES = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bf16", 2)}
OTHER_ITEM_BITS = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
    "I32": 32,
    "U32": 32,
    "I16": 16,
    "U16": 16,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


class SafetensorsCheckpoint:
    """The tensors of a folder's safetensors files.

    Where an index stands beside a single `model.safetensors`, the index wins, and files that it does not list are
    not opened. Data is read with plain reads, never mapped: a file cut short while we read is an error message, not
    a bus error.
    """

    def __init__(self, folder: Path) -> None:
        self.place = folder
        index = folder / INDEX
        if index.is_symlink() or index.exists():
            self.entries: Mapping[str, TensorEntry] = _sharded_entries(folder, index)
        else:
            self.entries = read_header(_single_file(folder))

    def can_read(self, entry: TensorEntry) -> bool:
        """True for the plain floating-point dtypes."""
        return entry.format in DTYPES

    def read(self, name: str) -> RawTensor:
        """Read one tensor into memory of its own."""
        entry = self.entries[name]
        if entry.format not in DTYPES:
            raise UnsupportedModel(
                f"{entry.file}: tensor {name} has dtype {entry.format}; this version reads {', '.join(DTYPES)} "
                "(quantised safetensors checkpoints are not supported)"
            )
        data = np.empty(entry.num_bytes, np.uint8)
        with open_file(entry.file) as file:
            file.seek(entry.offset)
            fill(file, data, entry)
        return RawTensor(name, entry.shape, DTYPES[entry.format][0], data)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that would be read from `folder`, in name order; empty when there are none."""
    index = folder / INDEX
    if index.is_symlink() or index.exists():
        return sorted({folder / shard for shard in _read_index(folder, index).values()})
    single = folder / SINGLE
    if single.is_symlink() or single.exists():
        return [single]
    others = sorted(folder.glob("*.safetensors"))
    return others if len(others) == 1 else []


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors that a file's header lists, each checked to lie inside the file."""
    try:
        with open_file(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            if size < 8:
                raise ModelError(f"{path}: not a safetensors file: only {size} bytes long")
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                raise ModelError(
                    f"{path}: header says it is {length:,} bytes long, but the file has {size:,}; truncated or not safetensors"
                )
            if length > MAX_HEADER_BYTES:
                raise ModelError(f"{path}: header of {length:,} bytes is larger than the format allows ({MAX_HEADER_BYTES:,})")
            raw = file.read(length)
    except OSError as err:
        raise ModelError(f"{path}: cannot be read: {err.strerror or err}") from err
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as err:
        raise ModelError(f"{path}: header is not valid JSON: {err}") from err
    if not isinstance(header, dict):
        raise ModelError(f"{path}: header is not a JSON object")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, info, 8 + length, size) for name, info in header.items()}
    _check_contiguous(path, entries, 8 + length, size)
    return entries


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} stands twice")
    return result


def _entry(path: Path, name: str, info: Any, base: int, size: int) -> TensorEntry:
    where = f"{path}: tensor {name}"
    if not isinstance(info, dict):
        raise ModelError(f"{where}: header entry is not an object")
    shape, offsets, dtype = info.get("shape"), info.get("data_offsets"), info.get("dtype")
    if not (isinstance(shape, list) and len(shape) <= MAX_DIMS and all(_is_count(n) for n in shape)):
        raise ModelError(f"{where}: bad shape in the header: {str(shape)[:80]}")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(_is_count(n) for n in offsets) and offsets[0] <= offsets[1]):
        raise ModelError(f"{where}: bad data_offsets in the header: {str(offsets)[:80]}")
    bits = DTYPES[dtype][1] * 8 if dtype in DTYPES else OTHER_ITEM_BITS.get(str(dtype))
    if bits is None:
        raise ModelError(f"{where}: unknown dtype {str(dtype)[:40]!r}")
    start, end = offsets
    if base + end > size:
        raise ModelError(f"{where}: data ends at byte {base + end:,}, but the file has {size:,}; the file is truncated")
    needed = (math.prod(shape) * bits + 7) // 8
    if end - start != needed:
        raise ModelError(f"{where}: shape {shape} of {dtype} needs {needed:,} bytes, but the header gives it {end - start:,}")
    return TensorEntry(name, tuple(shape), str(dtype), path, base + start, end - start)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _check_contiguous(path: Path, entries: Mapping[str, TensorEntry], start: int, size: int) -> None:
    """The format leaves no byte out and uses none twice: anything else is a damaged or made-up file."""
    end, last = start, "the header"
    for entry in sorted(entries.values(), key=lambda e: (e.offset, e.num_bytes)):
        if entry.offset != end:
            how = "overlap" if entry.offset < end else "leave a hole between them"
            raise ModelError(f"{path}: {last} and tensor {entry.name} {how}; the file is damaged")
        end, last = entry.offset + entry.num_bytes, f"tensor {entry.name}"
    if end != size:
        raise ModelError(f"{path}: {size - end:,} bytes stand after the last tensor; the file is damaged")


def _single_file(folder: Path) -> Path:
    files = weight_files(folder)
    if not files:
        found = sorted(p.name for p in folder.glob("*.safetensors"))
        detail = f"several files ({', '.join(found[:4])}) and no {INDEX} that says which" if found else "no safetensors file"
        raise ModelError(f"{folder}: {detail}; expected {SINGLE} or {INDEX} with its shards")
    return files[0]


def _read_index(folder: Path, index: Path) -> dict[str, str]:
    weight_map = read_json(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: has no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _stays_inside(shard):
            raise ModelError(f"{index}: tensor {name} is said to be in {str(shard)[:80]!r}, which leaves the model's folder; refused")
        if not shard.endswith(".safetensors"):
            raise UnsupportedModel(f"{index}: tensor {name} is said to be in {shard!r}; only safetensors files are read")
    return weight_map


def _stays_inside(shard: str) -> bool:
    """True for a plain relative path. Links are not followed here: the hub cache is made of them."""
    for kind in (PurePosixPath, PureWindowsPath):
        path = kind(shard)
        if path.is_absolute() or path.drive or path.root or ".." in path.parts:
            return False
    return "\x00" not in shard and bool(shard.strip())


def _sharded_entries(folder: Path, index: Path) -> dict[str, TensorEntry]:
    weight_map = _read_index(folder, index)
    headers: dict[str, dict[str, TensorEntry]] = {}
    for shard in sorted(set(weight_map.values())):
        headers[shard] = read_header(folder / shard)
    entries: dict[str, TensorEntry] = {}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise WeightMismatch(f"{folder / shard}: has no tensor {name}, which {index.name} says is there")
        entries[name] = headers[shard][name]
    for header in headers.values():  # in a shard but not in the index: still part of the checkpoint, so judged like the rest
        for name, entry in header.items():
            entries.setdefault(name, entry)
    return entries
