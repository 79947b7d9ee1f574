"""What is on this machine: which names resolve to what, and whether anything still has to be fetched."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from batchinfer.errors import ConfigError, ModelError
from batchinfer.weights.aliases import Alias, read_aliases
from batchinfer.weights.fetch import cached_hub_folder, cached_wheel_file, hub_cache, hub_token, models_cache
from batchinfer.weights.source import ModelFiles, try_local


@dataclass(frozen=True, slots=True)
class KnownName:
    """A name that --model takes, where it leads, and the files if they are here already."""

    name: str
    about: str
    origin: str
    files: Path | None
    missing: str = "fetched at first use"  # what stands between the name and its files, where they are not here


def known_names() -> list[KnownName]:
    """Every alias, then what stands in BATCHINFER_MODELS and in the hub's cache. Nothing is fetched."""
    names = [_known_alias(alias) for alias in read_aliases().values()]
    taken = {known.name for known in names}
    shelf = os.environ.get("BATCHINFER_MODELS")
    if shelf and Path(shelf).expanduser().is_dir():
        inside = [path for path in sorted(Path(shelf).expanduser().iterdir()) if path.name not in taken and not path.name.startswith(".")]
        found = [(path, _try_files(path.name)) for path in inside]
        names += [KnownName(path.name, "in BATCHINFER_MODELS", str(path), files.path) for path, files in found if files]
    for folder in sorted(hub_cache().glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        snapshot = cached_hub_folder(repo, None)
        if snapshot is not None:
            names.append(KnownName(repo, "in the hub's cache", repo, snapshot))
    return names


def _known_alias(alias: Alias) -> KnownName:
    local = _try_files(alias.name)
    if local is not None:
        return KnownName(alias.name, alias.about, str(local.path), local.path)
    wheel = alias.wheel
    origin = f"PyPI {wheel.package} {wheel.version}, else {alias.hub}" if wheel else alias.hub
    files = cached_wheel_file(alias) or cached_hub_folder(alias.hub, None)
    if alias.gated and hub_token() is None:
        copy = f"; -m {alias.ungated} is a copy that is not" if alias.ungated else ""
        return KnownName(alias.name, alias.about, origin, files, f"gated, needs HF_TOKEN{copy}")
    return KnownName(alias.name, alias.about, origin, files)


def _try_files(name: str) -> ModelFiles | None:
    try:
        return try_local(name)
    except ModelError:
        return None


def unpacked_models() -> list[tuple[str, int]]:
    """Names and bytes of what this tool unpacked into its own cache."""
    root = models_cache()
    if not root.is_dir():
        return []
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    return [(path.name, sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())) for path in folders]


def remove_unpacked(name: str) -> None:
    """Delete one unpacked model from this tool's own cache."""
    root = models_cache()
    if name not in [known for known, _ in unpacked_models()]:
        raise ConfigError(f"{name!r} is not in {root}; what stands there: {', '.join(n for n, _ in unpacked_models()) or 'nothing'}")
    shutil.rmtree(root / name)
