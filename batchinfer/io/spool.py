"""stdin and pipes, kept on disk: the finish reads the input a second time."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from batchinfer.errors import InputFileError
from batchinfer.io.data_file import LocalFile
from batchinfer.io.durable import written_whole
from batchinfer.io.source import InputFiles

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Spooled:
    """An input that came through a pipe: its files now, and what identifies its content."""

    files: InputFiles
    identity: list[list[object]]


def spool(files: InputFiles, path: Path) -> Spooled:
    """Write everything that the pipe gives to `path`."""
    digest = blake2b(digest_size=16)
    size = 0
    given = files.paths[0]
    is_stdin = str(given) == "/dev/stdin"
    if is_stdin and sys.__stdin__ is None:
        raise InputFileError("-: stdin is closed; pipe rows into it, or give a file")
    try:
        source = sys.stdin.fileno() if is_stdin else os.open(given, os.O_RDONLY)
    except (OSError, ValueError, AttributeError) as error:
        raise InputFileError(f"{given}: cannot be read: {error}") from None
    with written_whole(path) as file:
        while chunk := os.read(source, CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            file.write(chunk)
    return Spooled(replace(files, files=(LocalFile(path),), streamed=False), [["stdin", size, digest.hexdigest()]])
