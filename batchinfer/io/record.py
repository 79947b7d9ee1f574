"""`InputRow`: one row of the input as it was read, before anybody asks what it wants."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from batchinfer.errors import InputError


@dataclass(slots=True)
class InputRow:
    """One row: where it stands, its bytes (line formats only), and once parsed its columns or why it has none.

    `position` counts rows of the whole input from 0; `line` is the physical line from 1, or the table row
    from 0 in its file.
    `plain` promises that `raw` is strict JSON with no key twice, so that it may be copied to the output as it is.
    """

    position: int
    line: int
    file: str = ""  # named only where the input is more than one file
    raw: bytes = b""
    values: dict[str, Any] | None = None
    error: InputError | None = None
    plain: bool = False
    unit: str = "line"
    min_max_tokens: int = 0  # a row that runs again because it was cut gets at least so many
    key: bytes = b""  # what the values depend on beside `raw`: a CSV file's header

    @property
    def place(self) -> str:
        """Where people find the row: `line 8`, `b.jsonl line 8`, `row 3`."""
        return f"{self.file} {self.unit} {self.line}" if self.file else f"{self.unit} {self.line}"

    def digest(self) -> str:
        """Hash of what was read, 16 hex digits: a resumed job and the finish compare it."""
        data = self.raw or repr(self.values).encode("utf-8", "surrogatepass")
        return blake2b(data, digest_size=8, key=self.key).hexdigest()
