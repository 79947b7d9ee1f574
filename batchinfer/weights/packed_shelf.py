"""Where packed weights are kept: a folder of the cache, limited in size; what was used longest ago goes first."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from batchinfer.config import cache_root
from batchinfer.errors import ConfigError
from batchinfer.weights.packed_file import SCRATCH, DamagedFile, PackedFile, is_abandoned

log = logging.getLogger(__name__)

LIMIT_VARIABLE = "BATCHINFER_PACKED_WEIGHTS"
DEFAULT_LIMIT = 16 << 30
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|k|m|g|t)(i?)b?", re.IGNORECASE)
SPARE = 2  # times a file's size that the disk must have free


@dataclass(frozen=True, slots=True)
class Kept:
    """One file of packed weights, with what it says of itself."""

    path: Path
    num_bytes: int
    model: str
    form: str


def packed_folder() -> Path:
    """The folder of packed weights."""
    return cache_root() / "packed"


def packed_limit() -> int:
    """Bytes that packed weights may take: `BATCHINFER_PACKED_WEIGHTS`, a size or `off`, else 16 GiB."""
    given = os.environ.get(LIMIT_VARIABLE, "").strip()
    if not given:
        return DEFAULT_LIMIT
    if given.lower() == "off":
        return 0
    match = SIZE.fullmatch(given)
    if match is None:
        raise ConfigError(f"{LIMIT_VARIABLE}={given}: must be a size, such as 4GiB, or off")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " "))


def require_room(num_bytes: int) -> None:
    """Make the folder, and raise `OSError` where so many bytes may not be kept: above the limit, or without as many to spare on the disk."""
    if num_bytes > packed_limit():
        raise OSError(f"they take {num_bytes / 1e6:,.0f} MB of at most {packed_limit() / 1e6:,.0f}; {LIMIT_VARIABLE} sets another limit")
    folder = packed_folder()
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < SPARE * num_bytes:
        raise OSError(f"they take {num_bytes / 1e6:,.0f} MB, and {folder} has {free / 1e6:,.0f} MB free")


def try_open(place: Path) -> PackedFile | None:
    """The file at `place`, now the one used last; None where there is none that may be read. A damaged one is deleted, aloud."""
    if not os.access(place, os.R_OK):
        return None
    try:
        found = PackedFile(place)
    except DamagedFile as err:
        if place.exists():  # else another process deleted it just now
            discard(place, err)
        return None
    except OSError as err:
        log.warning("%s: cannot be mapped into memory: %s; the weights are packed again", place, err)
        return None
    with suppress(OSError):
        os.utime(place)
    return found


def discard(place: Path, reason: DamagedFile) -> None:
    """Delete a damaged file, and say so."""
    log.warning("%s; the weights are packed again", reason)
    with suppress(OSError):
        place.unlink(missing_ok=True)


def make_room(num_bytes: int) -> None:
    """Delete what was used longest ago until `num_bytes` more are within the limit. A file in use lives on until its process ends."""
    with suppress(OSError):
        for path in _abandoned():
            path.unlink(missing_ok=True)
        left = packed_limit() - num_bytes
        for path, size in _files():
            left -= size
            if left < 0:
                path.unlink(missing_ok=True)


def kept_weights() -> list[Kept]:
    """What is kept, the file used last first."""
    found = []
    for path, size in _files():
        try:
            facts = PackedFile(path).facts
        except DamagedFile:
            facts = {"model": "damaged"}
        except OSError:
            facts = {}
        found.append(Kept(path, size, facts.get("model", "?"), facts.get("form", "?")))
    return found


def clear_packed(kept: Iterable[Kept]) -> None:
    """Delete these files, and what writers left that were killed."""
    for path in [*(each.path for each in kept), *_abandoned()]:
        path.unlink(missing_ok=True)


def _abandoned() -> list[Path]:
    return [path for path in packed_folder().glob("*" + SCRATCH) if is_abandoned(path)]


def _files() -> list[tuple[Path, int]]:
    """The files and their sizes, the one used last first."""
    found = []
    for path in packed_folder().glob("*.safetensors"):
        with suppress(FileNotFoundError):  # another process makes room
            status = path.stat()
            found.append((status.st_mtime_ns, path, status.st_size))
    return [(path, size) for _, path, size in sorted(found, reverse=True)]
