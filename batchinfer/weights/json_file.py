"""JSON objects from a model's files, bounded in size, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from batchinfer.errors import ModelError
from batchinfer.weights.checkpoint import open_file

MAX_JSON_BYTES = 512 << 20


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """A JSON object from a model's file; `ModelError` names the file when it is none, or larger than `max_bytes`."""
    try:
        with open_file(path) as file:
            if file.seek(0, 2) > max_bytes:
                raise ModelError(f"{path}: larger than {max_bytes:,} bytes; not what its name says")
            file.seek(0)
            data = json.loads(file.readall().decode("utf-8-sig"))
    except OSError as err:
        raise ModelError(f"{path}: cannot be read: {err.strerror or err}") from err
    except (ValueError, RecursionError) as err:
        raise ModelError(f"{path}: not valid JSON: {err}") from err
    if not isinstance(data, dict):
        raise ModelError(f"{path}: not a JSON object")
    return data
