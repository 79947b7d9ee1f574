"""Outputs in an object store: made in a folder of the cache, brought to the store whole when the job is done.

A store takes no appended lines, so that a job's working files cannot stand beside such an output. They stand in
`<cache>/jobs/<name>-<hash of the address>`, where the same command finds them again from any folder of this machine.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from batchinfer.config import cache_root
from batchinfer.errors import ConfigError, OutputError
from batchinfer.io.remote import Store, explained, open_store

RENAMING = ("hdfs", "viewfs")  # stores where a rename replaces a file at once


class Delivery(Protocol):
    """Where a job's finished files belong."""

    def address(self, path: Path) -> str:
        """What people call the file."""

    def has(self, path: Path) -> bool:
        """True when the file is where it belongs."""

    def is_same(self, path: Path, tag: str | None) -> bool:
        """True when the file where it belongs is the one that `deliver` gave this tag."""

    def fetch(self, path: Path) -> None:
        """Make the file readable at `path`, where there is one."""

    def deliver(self, paths: Iterable[Path]) -> dict[str, str]:
        """Bring the files to where they belong, and remove there what is not here; tags by name."""

    def forget(self) -> None:
        """Remove what is not needed for going on."""


class Here:
    """Files are made where they belong."""

    def address(self, path: Path) -> str:
        """The path."""
        return str(path)

    def has(self, path: Path) -> bool:
        """True when it exists."""
        return path.exists()

    def is_same(self, path: Path, tag: str | None) -> bool:
        """True: a file that is here has no tag."""
        return True

    def fetch(self, path: Path) -> None:
        """Do nothing."""

    def deliver(self, paths: Iterable[Path]) -> dict[str, str]:
        """Do nothing."""
        return {}

    def forget(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Upload:
    """Files are made in `folder`, and belong under the same names into a store."""

    store: Store
    remote_folder: str
    folder: Path

    @classmethod
    def to(cls, given: str) -> tuple[Upload, Path]:
        """The delivery for an address, and the path in this machine's work folder that stands for it."""
        store, path = open_store(given, OutputError)
        if store.scheme == "hf":
            raise ConfigError(f"-o {given}: nothing is written to the hub; give a file here and send it with `hf upload`")
        folder, _, name = path.rpartition("/")
        top = (folder or path).split("/")[0]
        if top and not store.info(top).type:  # FileType.NotFound is 0
            raise OutputError(f"-o {given}: there is no {top!r} in this store; make it first")
        address = store.address(path)
        digest = blake2b(address.encode(), digest_size=6).hexdigest()
        work = cache_root() / "jobs" / f"{name[:80]}-{digest}"
        try:
            work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{work}: the work folder for {address} cannot be made: {error.strerror}; see BATCHINFER_CACHE") from None
        return cls(store, folder, work), work / name

    def _path(self, path: Path) -> str:
        return f"{self.remote_folder}/{path.name}"

    def address(self, path: Path) -> str:
        """The address in the store."""
        return self.store.address(self._path(path))

    def has(self, path: Path) -> bool:
        """True when the store has it."""
        return bool(self.store.info(self._path(path)).type)

    def is_same(self, path: Path, tag: str | None) -> bool:
        """True when the store's tag is still this one."""
        return self.store.tag(self._path(path)) == tag

    def fetch(self, path: Path) -> None:
        """Download the file, where the store has it and this machine does not."""
        from pyarrow.fs import LocalFileSystem, copy_files

        if not path.exists() and self.has(path):
            with explained(self.address(path), OutputError):
                copy_files(
                    self._path(path),
                    str(path),
                    source_filesystem=self.store.fs,
                    destination_filesystem=LocalFileSystem(),
                )

    def deliver(self, paths: Iterable[Path]) -> dict[str, str]:
        """Upload the files, each of which appears whole or not at all."""
        tags = {}
        for path in paths:
            if path.exists():
                self._upload(path)
                tags[path.name] = self.store.tag(self._path(path))
            elif self.has(path):
                with explained(self.address(path), OutputError):
                    self.store.fs.delete_file(self._path(path))
        return tags

    def _upload(self, path: Path) -> None:
        from pyarrow.fs import LocalFileSystem, copy_files

        # In one call of Arrow's own: a signal that ends the process leaves an upload that was never completed,
        # which no store shows, while an exception between our own writes would complete a part of the file.
        renames = self.store.scheme in RENAMING
        target = self._path(path) + (".tmp" if renames else "")
        try:
            with explained(self.address(path), OutputError):
                copy_files(str(path), target, source_filesystem=LocalFileSystem(), destination_filesystem=self.store.fs)
                if renames:
                    self.store.fs.move(target, self._path(path))
                arrived = self.store.info(self._path(path)).size
                if arrived != path.stat().st_size:
                    raise OSError(f"{arrived} bytes arrived of {path.stat().st_size}")
        except OutputError as error:
            raise OutputError(f"{error}; everything finished is kept in {self.folder}: run the same command again to send it") from None

    def forget(self) -> None:
        """Remove the work folder, unless results stand in it that were not delivered."""
        if not any(self.folder.glob("*.partial")):
            shutil.rmtree(self.folder, ignore_errors=True)


HERE = Here()
