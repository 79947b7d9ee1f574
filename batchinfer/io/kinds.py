"""Kinds of input files: by the name's ending, held against the first bytes."""

from __future__ import annotations

import os

from batchinfer.errors import InputFileError
from batchinfer.io.data_file import DataFile, read_head

LINE_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text", ".csv": "csv", ".tsv": "csv"}
TABLE_KINDS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".ipc": "arrow",
    ".feather": "arrow",
}
KINDS = {**LINE_KINDS, **TABLE_KINDS}
PACKINGS = (".gz", ".zst", ".zstd")
LATER = {".bz2": "bzip2", ".xz": "xz", ".zip": "zip", ".lz4": "lz4", ".xlsx": "Excel", ".avro": "Avro", ".orc": "ORC"}
PARQUET_MAGIC, ARROW_MAGIC, FEATHER_1_MAGIC, ARROW_STREAM_MAGIC = b"PAR1", b"ARROW1", b"FEA1", b"\xff\xff\xff\xff"
GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
READABLE = ".jsonl, .ndjson, .csv, .tsv or .txt (each also .gz or .zst), .parquet or .arrow"


def without_packing(name: str) -> str:
    """The name without an ending that says how the bytes are packed: `a.jsonl` for `a.jsonl.gz`."""
    lower = name.lower()
    packing = next((ending for ending in PACKINGS if lower.endswith(ending)), "")
    return name[: len(name) - len(packing)]


def ending_of(name: str) -> str:
    """The ending that says the kind, in small letters: `.jsonl` for `A.JSONL.gz`."""
    return os.path.splitext(without_packing(name).lower())[1]


def is_readable_name(name: str) -> bool:
    """True when the ending is that of a kind that is read."""
    return ending_of(name) in KINDS


def kind_of(file: DataFile) -> str:
    """The file's kind, or `InputFileError` with the way out for what cannot be read."""
    ending = ending_of(file.name)
    if ending in LATER:
        raise InputFileError(f"{file.label}: {LATER[ending]} is not read by this version; convert it to .jsonl or .parquet")
    if ending == ".json":
        raise InputFileError(f"{file.label}: a JSON document is not a list of rows; write one object a line and name it .jsonl")
    head = read_head(file)
    kind = KINDS.get(ending) or _kind_by_content(head)
    if kind is None:
        raise InputFileError(f"{file.label}: unknown kind of file; name it {READABLE}")
    if kind in TABLE_KINDS.values():
        if without_packing(file.name) != file.name:
            raise InputFileError(f"{file.label}: a packed {_title(kind)} file is not read; unpack it first")
        return kind
    if head.startswith((PARQUET_MAGIC, ARROW_MAGIC)):
        real = "parquet" if head.startswith(PARQUET_MAGIC) else "arrow"
        raise InputFileError(f"{file.label}: the content is {_title(real)}, not lines of text; name it .{real}")
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise InputFileError(f"{file.label}: the content is UTF-16; convert it to UTF-8")
    return kind


def _kind_by_content(head: bytes) -> str | None:
    if head.startswith(PARQUET_MAGIC):
        return "parquet"
    return "arrow" if head.startswith(ARROW_MAGIC) else None


def _title(kind: str) -> str:
    return {"parquet": "Parquet", "arrow": "Arrow"}[kind]
