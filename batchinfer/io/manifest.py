"""`OUTPUT.manifest.json`: what the partial results belong to, so that a resumed job never mixes two jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from batchinfer.io.durable import write_whole

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """`fingerprint`: what can change text; `free` and `versions` may differ and are mentioned; `date` is frozen for templates.

    `resolved`: what the engine's automatic choices came out as; empty until there was an engine.
    """

    fingerprint: dict[str, Any]
    free: dict[str, Any]
    versions: dict[str, str]
    date: datetime
    resolved: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Put the manifest in place in one piece."""
        record = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "free": self.free,
            "versions": self.versions,
            "date": self.date.isoformat(),
            "resolved": self.resolved,
        }
        write_whole(path, json.dumps(record, indent=1, default=str).encode())


def try_read_manifest(path: Path) -> Manifest | None:
    """The manifest, None when there is none or it is not one of ours."""
    record = try_read_json(path)
    if record is None or record.get("format") != FORMAT:
        return None
    try:
        date = datetime.fromisoformat(record["date"])
        return Manifest(record["fingerprint"], record["free"], record["versions"], date, record.get("resolved", {}))
    except (KeyError, TypeError, ValueError):
        return None


def try_read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file, None when there is none."""
    try:
        loaded = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return loaded if isinstance(loaded, dict) else None


def normal(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprint as it reads after a round through JSON, so that old and new compare."""
    loaded: dict[str, Any] = json.loads(json.dumps(fingerprint, default=str))
    return loaded


def differences(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> list[tuple[str, Any, Any]]:
    """What differs: the way to it (`sampling.temperature`), what it was, what it is."""
    found: list[tuple[str, Any, Any]] = []
    for name in sorted({*old, *new}):
        before, now = old.get(name), new.get(name)
        if before == now:
            continue
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            found += differences(before, now, f"{path}{name}.")
        else:
            found.append((f"{path}{name}", before, now))
    return found
