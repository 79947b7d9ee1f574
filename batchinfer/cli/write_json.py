"""`--json FILE`: a machine's report, strict JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from batchinfer.errors import OutputError


def write_json(path: Path | None, document: dict[str, Any]) -> None:
    """Write a report; `-` is stdout, None is nowhere."""
    if path is None:
        return
    text = json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--json {path}: {error.strerror or error}") from None
