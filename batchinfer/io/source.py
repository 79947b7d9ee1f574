"""What the input is: a file, a folder of files, or stdin; of which kind; and how to tell whether it changed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from batchinfer.errors import InputFileError
from batchinfer.io.record import InputRow

LINE_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text"}
KINDS = {**LINE_KINDS, ".parquet": "parquet", ".pq": "parquet"}
LATER = {
    ".csv": "CSV",
    ".tsv": "TSV",
    ".arrow": "Arrow IPC",
    ".ipc": "Arrow IPC",
    ".feather": "Arrow IPC",
    ".zst": "zstd",
    ".bz2": "bzip2",
    ".xz": "xz",
}
OWN_OUTPUTS = (".out.jsonl", ".out.parquet", ".errors.jsonl", ".partial", ".manifest.json", ".report.json", ".lock", ".tmp", ".stdin")


class Source(Protocol):
    """Rows in a fixed order that can be read again."""

    kind: str  # "jsonl" | "text" | "parquet"
    num_rows: int | None  # of the whole input, where that is known without reading it
    files: tuple[Path, ...]

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[InputRow]:
        """Yield rows `start` to `stop` by position; line formats leave parsing to `parse`."""

    def count(self, start: int = 0, stop: int | None = None) -> int:
        """How many rows there are from `start` to `stop`; line formats read the input for it."""

    def parse(self, row: InputRow) -> None:
        """Fill the row's values or error."""

    def fraction_read(self) -> float:
        """How far the latest `rows()` has come, 0 to 1."""


@dataclass(frozen=True, slots=True)
class InputFiles:
    """The files of an input, all of one kind, in reading order."""

    kind: str
    paths: tuple[Path, ...]
    folder: Path | None = None
    streamed: bool = False  # stdin or a pipe: to be spooled before anything reads it


def find_files(given: str, output: Path | None = None) -> InputFiles:
    """Say which files `given` means, or raise `InputFileError` with the way out. A folder's `output` is left out."""
    if given == "-":
        return InputFiles("jsonl", (Path("/dev/stdin"),), streamed=True)
    if "://" in given:
        raise InputFileError(f"{given}: remote input is not read by this version; copy it to this machine first")
    path = Path(given)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if any(mark in given for mark in "*?["):
            raise InputFileError(f"{given}: patterns are not read by this version; pass the folder, or one file") from None
        raise InputFileError(f"{given}: no such file") from None
    except OSError as error:
        raise InputFileError(f"{given}: cannot be read: {error.strerror}") from None
    if stat.S_ISDIR(mode):
        return _files_of_folder(path, output)
    if not stat.S_ISREG(mode):
        return InputFiles("jsonl", (path,), streamed=True)
    return InputFiles(kind_of(path), (path,))


def _files_of_folder(folder: Path, output: Path | None) -> InputFiles:
    own = os.path.realpath(output) if output is not None else None
    entries = sorted(folder.iterdir(), key=lambda path: path.name)
    found = [path for path in entries if _is_data(path) and os.path.realpath(path) != own]
    if not found:
        raise InputFileError(f"{folder}: no .jsonl, .txt or .parquet file in this folder")
    kinds = {kind_of(path): path.name for path in reversed(found)}
    if len(kinds) > 1:
        named = ", ".join(f"{kind} ({name})" for kind, name in sorted(kinds.items()))
        raise InputFileError(f"{folder}: holds files of more than one kind: {named}; put each kind into a folder of its own")
    return InputFiles(next(iter(kinds)), tuple(found), folder=folder)


def _is_data(path: Path) -> bool:
    name = path.name
    if name.startswith((".", "_")) or name.endswith(OWN_OUTPUTS) or not path.is_file():
        return False
    # A file beside which our report or working files stand is the output of an earlier job.
    if any(path.with_name(name + end).exists() for end in (".report.json", ".manifest.json")):
        return False
    return _suffix(name) in KINDS


def _suffix(name: str) -> str:
    lower = name.lower()
    return os.path.splitext(lower[:-3] if lower.endswith(".gz") else lower)[1]


def kind_of(path: Path) -> str:
    """The kind by name, held against the first bytes; raises `InputFileError` for what cannot be read."""
    ending = _suffix(path.name)
    if ending in LATER:
        raise InputFileError(f"{path}: {LATER[ending]} is not read by this version; convert it to .jsonl or .parquet")
    if ending == ".json":
        raise InputFileError(f"{path}: a JSON document is not a list of rows; write one object a line and name it .jsonl")
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise InputFileError(f"{path}: cannot be read: {error.strerror}") from None
    kind = KINDS.get(ending) or ("parquet" if head == b"PAR1" else None)
    if kind is None:
        raise InputFileError(f"{path}: unknown kind of file; name it .jsonl, .ndjson, .txt (each also .gz) or .parquet")
    if kind == "parquet" and path.name.lower().endswith(".gz"):
        raise InputFileError(f"{path}: a compressed Parquet file is not read; decompress it first")
    if kind != "parquet":
        if head == b"PAR1":
            raise InputFileError(f"{path}: the content is Parquet, not lines of text; name it .parquet")
        if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise InputFileError(f"{path}: the content is UTF-16; convert it to UTF-8")
        if head == b"\x28\xb5\x2f\xfd":
            raise InputFileError(f"{path}: zstd is not read by this version; decompress it first")
    return kind


def stem_of(path: Path) -> str:
    """The name without what says its kind: `a` for `a.jsonl.gz`."""
    name = path.name[:-3] if path.name.lower().endswith(".gz") else path.name
    return os.path.splitext(name)[0]


def open_source(files: InputFiles) -> Source:
    """The reader for these files."""
    if files.kind == "parquet":
        from batchinfer.io.parquet_source import ParquetSource

        return ParquetSource(files.paths)
    from batchinfer.io.line_source import LineSource

    return LineSource(files.paths, files.kind)


def identity_of(paths: tuple[Path, ...]) -> list[list[object]]:
    """Name, size and modification time of each file: what a resumed job compares first."""
    found: list[list[object]] = []
    for path in paths:
        facts = path.stat()
        found.append([path.name, facts.st_size, facts.st_mtime_ns])
    return found


def content_digest(paths: tuple[Path, ...]) -> str:
    """Hash of what the files hold: tells a file that was copied or touched from one that was changed."""
    digest = blake2b(digest_size=16)
    for path in paths:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode("utf-8", "surrogateescape"))
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
