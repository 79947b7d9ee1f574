"""Bytes of a file as they were before gzip or zstd packed them, as a stream in constant memory."""

from __future__ import annotations

import gzip
import io
import zlib
from typing import BinaryIO, cast

from batchinfer.errors import InputFileError
from batchinfer.io.data_file import DataFile
from batchinfer.io.kinds import GZIP_MAGIC, ZSTD_MAGIC

BUFFER_BYTES = 1 << 16  # what was unpacked before the damage is lost with it
DAMAGE = (EOFError, zlib.error, OSError)  # what unpacking raises for bytes that are damaged or end too early


def unpacked(file: BinaryIO) -> BinaryIO:
    """The file itself, or what its packing holds; the first bytes decide."""
    head = cast(io.BufferedReader, file).peek(4)[:4]  # not by seeking: a pipe cannot
    if head.startswith(GZIP_MAGIC):
        return io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=file)), BUFFER_BYTES)
    if head == ZSTD_MAGIC:
        import pyarrow as pa

        return io.BufferedReader(cast(io.RawIOBase, pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")), BUFFER_BYTES)
    return file


def explain(file: DataFile, opened: BinaryIO, line: int, error: BaseException) -> InputFileError:
    """The error for people; `opened` is what `unpacked` gave."""
    if isinstance(error, OSError) and error.errno is not None:
        return InputFileError(f"{file.label}: cannot be read: {error.strerror or error}")
    raw = getattr(opened, "raw", None)
    packing = "gzip" if isinstance(raw, gzip.GzipFile) else "zstd" if type(raw).__name__ == "CompressedInputStream" else ""
    first = (str(error) or type(error).__name__).splitlines()[0]
    if not packing:
        return InputFileError(f"{file.label}: cannot be read: {first}")
    return InputFileError(f"{file.label}: the {packing} data is damaged or cut off after line {line:,}: {first}; was it copied whole?")
