"""Which files an INPUT on the command line means: one file, a folder, a pattern, stdin, or the same in a store."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Container, Iterable
from pathlib import Path

from batchinfer.errors import InputFileError
from batchinfer.io.data_file import DataFile, LocalFile
from batchinfer.io.kinds import is_readable_name, kind_of
from batchinfer.io.source import InputFiles, stem_of

OWN_OUTPUTS = (".partial", ".manifest.json", ".report.json", ".lock", ".tmp", ".stdin")
OWN_RESULTS = (".out.jsonl", ".out.parquet", ".errors.jsonl")
OWN_COMPANIONS = (".report.json", ".manifest.json")  # a file beside which one of these stands is the output of a job
MARKS = "*?["


def find_files(given: str, output: str | None = None, text_columns: tuple[str, ...] = ()) -> InputFiles:
    """Say which files `given` means, or raise `InputFileError` with the way out. `output` is never among them."""
    if given == "-":
        return InputFiles("jsonl", (LocalFile(Path("/dev/stdin")),), streamed=True)
    if given.startswith("file://"):
        given = given.removeprefix("file://")
    if "://" in given:
        from batchinfer.io.remote import find_remote

        found = find_remote(given)
        kept = [
            file for file in found.files if not found.many or not (is_left_out(file.name, file.label, found.labels) or file.label == output)
        ]
        return _of_one_kind(given, kept, found.home, text_columns)
    path = Path(given)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if any(mark in given for mark in MARKS):
            return _files_of_pattern(given, output, text_columns)
        raise InputFileError(f"{given}: no such file") from None
    except OSError as error:
        raise InputFileError(f"{given}: cannot be read: {error.strerror}") from None
    if stat.S_ISDIR(mode):
        entries = sorted(path.iterdir(), key=lambda entry: entry.name)
        return _of_one_kind(given, _data_files(entries, output, path), path.resolve().name, text_columns)
    if not stat.S_ISREG(mode):
        return InputFiles("jsonl", (LocalFile(path),), streamed=True)
    file = LocalFile(path)
    return InputFiles(kind_of(file), (file,), text_columns=text_columns)


def _files_of_pattern(pattern: str, output: str | None, text_columns: tuple[str, ...]) -> InputFiles:
    """The files that a shell's pattern (`*`, `?`, `[ab]`, `**` for folders at any depth) means, in the order of their paths."""
    fixed = Path(*fixed_parts(Path(pattern).parts))
    found = sorted({Path(path) for path in glob.glob(pattern, recursive=True)})
    if not found:
        raise InputFileError(f"{pattern}: no file has such a name")
    return _of_one_kind(pattern, _data_files(found, output, fixed), fixed.resolve().name or "all", text_columns)


def fixed_parts(parts: Iterable[str]) -> list[str]:
    """The leading parts of a pattern's path that hold no mark, its last part aside."""
    fixed: list[str] = []
    for part in list(parts)[:-1]:
        if any(mark in part for mark in MARKS):
            break
        fixed.append(part)
    return fixed


def _data_files(entries: list[Path], output: str | None, root: Path) -> list[DataFile]:
    own = os.path.realpath(output) if output is not None else None
    found: list[DataFile] = []
    for path in entries:
        companions = {str(path) + end for end in OWN_COMPANIONS if os.path.exists(str(path) + end)}
        if path.is_file() and not is_left_out(path.name, str(path), companions) and os.path.realpath(path) != own:
            found.append(LocalFile(path, os.path.relpath(path, root)))
    return found


def is_left_out(name: str, path: str, others: Container[str]) -> bool:
    """True for what stands in a folder and is no input: what a job left there, hidden files, files of no kind that is read."""
    base = name.rpartition("/")[2]
    if base.startswith((".", "_")) or base.endswith(OWN_OUTPUTS) or base.endswith(OWN_RESULTS) or not is_readable_name(base):
        return True
    return any(path + end in others for end in OWN_COMPANIONS)


def _of_one_kind(given: str, found: Iterable[DataFile], home: str, text_columns: tuple[str, ...]) -> InputFiles:
    files = tuple(found)
    if not files:
        raise InputFileError(
            f"{given}: no .jsonl, .csv, .txt, .parquet or .arrow file here (results of this tool aside); files in folders inside are meant by a pattern such as '**/*.jsonl'"
        )
    kinds = {kind_of(file): file.name for file in reversed(files)}
    if len(kinds) > 1:
        named = ", ".join(f"{kind} ({name})" for kind, name in sorted(kinds.items()))
        raise InputFileError(
            f"{given}: holds files of more than one kind: {named}; choose one with a pattern such as '*.jsonl', or give each a folder"
        )
    return InputFiles(next(iter(kinds)), files, home=home, text_columns=text_columns)


def default_stem(files: InputFiles) -> str:
    """What a default output's name begins with."""
    return files.home if files.home is not None else stem_of(files.files[0].name)
