"""A physical line as it travels from file to row, and how long one may be."""

from __future__ import annotations

from typing import TypeAlias

from batchinfer.errors import InputError
from batchinfer.io.record import InputRow

MAX_LINE_BYTES = 64 << 20  # a row of lines; with its values in Python it takes a few times that
KEPT_OF_LONG = 4096  # bytes kept of a longer one

Line: TypeAlias = tuple[int, bytes, int]  # number from 1, bytes, how many there were


def whole_text(row: InputRow) -> str | None:
    """The row's bytes as text; None, with the row's error filled in, where they are not UTF-8."""
    try:
        return row.raw.decode()
    except UnicodeDecodeError as error:
        row.error = InputError(f"{row.place}: not UTF-8: byte 0x{row.raw[error.start]:02x} at byte {error.start + 1}", "invalid_utf8")
        return None
