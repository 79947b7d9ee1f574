"""Files that are there whole or not at all, also after a power cut."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from batchinfer.errors import OutputError

BUFFER_BYTES = 1 << 20


def sync_folder(folder: Path) -> None:
    """Push a folder's entries to the disk: a rename is durable only then."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:  # some network file systems cannot; the rename itself has happened
        return
    finally:
        os.close(fd)


def write_whole(path: Path, data: bytes) -> None:
    """Put a small file in place in one piece."""
    with written_whole(path) as file:
        file.write(data)


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write, renamed to `path` when the block ends well and removed when it does not."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb", buffering=BUFFER_BYTES) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        _remove(temporary)
        raise OutputError(f"{path}: {error.strerror or error}") from error
    except BaseException:
        _remove(temporary)
        raise


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return
