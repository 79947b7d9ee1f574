"""Object stores: `s3://`, `gs://`, `abfs://`, `hdfs://` through `pyarrow.fs`, and datasets of the hub as `hf://`."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from batchinfer.errors import BatchInferError, ConfigError, InputFileError
from batchinfer.io.data_file import DataFile

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs", "hf")
READ_BYTES = 8 << 20  # a request each
COLUMN_BYTES = 4 << 20
MARKS = "*["  # `?` begins the settings of a store
SETTINGS = re.compile(r"\?(?=[a-z_]+=)")


def is_remote(given: str) -> bool:
    """True for an address, false for a path; `file://` is a path."""
    return "://" in given and not given.startswith("file://")


@dataclass(frozen=True, slots=True)
class Store:
    """A file system that is not this machine's, and how its paths are written as addresses."""

    fs: Any
    scheme: str
    prefix: str  # of an address, before the path that `fs` knows
    cut: str  # what of that path stands in the prefix already

    def address(self, path: str) -> str:
        """The address of a path, without the store's settings."""
        return self.prefix + path.removeprefix(self.cut)

    def info(self, path: str) -> Any:
        """What the store says of a path: type, size, modification time."""
        with explained(self.address(path)):
            return self.fs.get_file_info(path)

    def tag(self, path: str) -> str:
        """What changes with the content: the store's own tag, else size and modification time."""
        with explained(self.address(path)):
            if self.scheme == "hf":
                return str(self.fs.handler.fs.info(path).get("blob_id") or self.fs.get_file_info(path).size)
            info = self.fs.get_file_info(path)
            if self.scheme in ("hdfs", "viewfs"):
                return f"{info.size}@{info.mtime_ns}"
            with self.fs.open_input_file(path) as opened:
                tag = (opened.metadata() or {}).get("ETag")
            return tag.decode() if tag else f"{info.size}@{info.mtime_ns}"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file in a store."""

    store: Store
    path: str
    name: str
    size: int  # as it was found

    @property
    def label(self) -> str:
        """Its address."""
        return self.store.address(self.path)

    @property
    def column_buffer(self) -> int:
        """Four mebibytes: every read is a request."""
        return COLUMN_BYTES

    def open(self) -> BinaryIO:
        """The file, buffered; what fails while it is read shows as `OSError`."""
        return io.BufferedReader(cast(io.RawIOBase, self.table()), READ_BYTES)

    def table(self) -> Any:
        """The file with random access."""
        with explained(self.label):
            return self.store.fs.open_input_file(self.path)

    def stamp(self) -> int | str:
        """The store's tag."""
        return self.store.tag(self.path)


@dataclass(frozen=True, slots=True)
class Found:
    """What an address means: its files in the order of their names; `labels`: what else stands beside them."""

    files: tuple[DataFile, ...]
    home: str
    many: bool
    labels: frozenset[str] = frozenset()


def open_store(given: str, error: type[BatchInferError] = InputFileError) -> tuple[Store, str]:
    """The store of an address and the path in it; `error` for what cannot be reached."""
    scheme, _, rest = given.partition("://")
    if scheme not in SCHEMES:
        raise error(f"{given}: {scheme}:// is not read; copy it to this machine, or give one of {', '.join(SCHEMES)}")
    rest, *settings = SETTINGS.split(rest, maxsplit=1)
    authority, _, key = rest.partition("/")
    if ":" in authority.rpartition("@")[0]:
        raise ConfigError(
            f"{scheme}://...: keys do not belong into an address; give them by the environment or the store's own settings file"
        )
    if scheme == "hf":
        return Store(_hub(), scheme, "hf://", ""), rest.rstrip("/")
    from pyarrow.fs import FileSystem

    query = f"?{settings[0]}" if settings else ""
    with explained(f"{scheme}://{authority}", error):
        fs, root = FileSystem.from_uri(f"{scheme}://{authority}/{query}")
    root = root.rstrip("/")
    return Store(fs, scheme, f"{scheme}://{authority}", root), f"{root}/{key}".rstrip("/")


def _hub() -> Any:
    from huggingface_hub import HfFileSystem
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    return PyFileSystem(FSSpecHandler(HfFileSystem()))


@contextmanager
def explained(label: str, error: type[BatchInferError] = InputFileError) -> Iterator[None]:
    """Turn what a store raises into one line that names the address."""
    try:
        yield
    except BatchInferError:
        raise
    except Exception as caught:  # stores raise what they like: OSError, Arrow's, the hub's, the network library's
        first = next((line.strip() for line in str(caught).splitlines() if line.strip()), type(caught).__name__)
        raise error(f"{label}: cannot be reached or read: {first}{_way_out(caught)}") from None


def _way_out(error: Exception) -> str:
    name = type(error).__name__
    if name == "OfflineModeIsEnabled":
        return " (HF_HUB_OFFLINE is set: fetch the files with `hf download` and give their folder)"
    if name in ("RepositoryNotFoundError", "GatedRepoError", "RevisionNotFoundError"):
        return " (is the name right? private and gated datasets need HF_TOKEN)"
    return ""


def find_remote(given: str) -> Found:
    """The files that an address means: one, those of a folder, or those of a pattern with `*`, `[ab]` and `**`."""
    from pyarrow.fs import FileType

    store, path = open_store(given)
    if any(mark in path for mark in MARKS):
        return _matching(store, path)
    info = store.info(path)
    if info.type == FileType.NotFound:
        raise InputFileError(f"{store.address(path)}: no such file or folder")
    name = path.rpartition("/")[2]
    if info.type == FileType.File:
        return Found((RemoteFile(store, path, name, info.size),), _home(name), many=False)
    return _listed(store, path, re.compile(r"[^/]+"), recursive=False)


def _home(name: str) -> str:
    from batchinfer.io.source import stem_of

    return stem_of(name)


def _matching(store: Store, pattern: str) -> Found:
    parts = pattern.split("/")
    fixed = next(index for index, part in enumerate(parts) if any(mark in part for mark in MARKS))
    inside = parts[fixed:]
    found = _listed(store, "/".join(parts[:fixed]), re.compile(_expression(inside)), recursive=len(inside) > 1)
    if not found.files:
        raise InputFileError(f"{store.address(pattern)}: no file has such a name")
    return found


def _expression(parts: list[str]) -> str:
    """The pattern as a regular expression over paths: `*` stays within a folder's name, `**` does not."""
    text = ""
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if part == "**":
            text += ".+" if last else "(?:[^/]+/)*"
            continue
        pieces = re.split(r"(\*+|\[[^]]+\])", part)
        text += "".join("[^/]*" if piece.startswith("*") else piece if piece[:1] == "[" else re.escape(piece) for piece in pieces)
        text += "" if last else "/"
    return text.replace("[!", "[^")


def _listed(store: Store, folder: str, wanted: re.Pattern[str], recursive: bool) -> Found:
    from pyarrow.fs import FileSelector, FileType

    with explained(store.address(folder)):
        infos = [item for item in store.fs.get_file_info(FileSelector(folder, recursive=recursive)) if item.type == FileType.File]
    named = sorted(((item.path.removeprefix(folder).lstrip("/"), item) for item in infos), key=lambda pair: pair[0])
    files = tuple(RemoteFile(store, item.path, name, item.size) for name, item in named if wanted.fullmatch(name))
    return Found(files, folder.rpartition("/")[2] or "all", many=True, labels=frozenset(store.address(item.path) for item in infos))
