"""`batchinfer models`: data on stdout, talk on stderr, nothing removed but what this tool unpacked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from batchinfer.attention.base import AttnSpec
from batchinfer.attention.kv_cache import KV_FORMATS
from batchinfer.cli.models import app
from batchinfer.errors import ConfigError
from batchinfer.weights.fetch import models_cache
from batchinfer.weights.packed_file import PackedWriter
from batchinfer.weights.packed_shelf import packed_folder
from tests.oracle.tiny_models import IM_END_ID, write_gguf, write_tiny


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("BATCHINFER_MODELS", str(tmp_path / "shelf"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def run(*args: str) -> str:
    result = CliRunner().invoke(app, list(args), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_list_names_what_is_here_and_where_the_caches_are(tmp_path: Path) -> None:
    write_tiny(tmp_path / "shelf" / "mine")
    data = json.loads(run("list", "--json"))
    here = {row["name"]: row["files"] for row in data["models"]}
    assert here == {"smollm2-135m": None, "llama-3.2-1b": None, "mine": str(tmp_path / "shelf" / "mine")}
    assert data["caches"]["unpacked models"] == str(tmp_path / "cache" / "models")
    text = run("list")
    assert "smollm2-135m" in text
    assert "fetched at first use" in text
    assert str(tmp_path / "hub") in text


def test_list_keeps_paths_whole_and_says_what_a_gated_name_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    folder = write_tiny(tmp_path / "shelf" / "a-name-that-is-long" / "-".join(["part"] * 12))
    (tmp_path / "shelf" / "mine").symlink_to(folder)
    text = run("list")
    assert str(tmp_path / "shelf" / "mine") in text
    assert "no: gated, needs HF_TOKEN" in text
    assert "unsloth/Llama-3.2-1B-Instruct" in text
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "a token")
    assert "gated, needs" not in run("list")


def keep(name: str, model: str) -> Path:
    path = packed_folder() / f"{name}.safetensors"
    writer = PackedWriter(path, 1)
    writer.add("embed/dense/weight", "U8", (2_000_000,), np.zeros(2_000_000, np.uint8))
    writer.finish({"model": model, "form": "int8, bf16"})
    return path


def test_packed_weights_are_listed_and_cleared(tmp_path: Path) -> None:
    first, second = keep("a", "one"), keep("b", "two")
    (packed_folder() / "torn.safetensors").write_bytes(b"x")
    assert "one (int8, bf16)  2 MB" in run("list")
    data = json.loads(run("list", "--json"))
    assert {kept["model"] for kept in data["packed"]} == {"one", "two", "damaged"}
    assert data["packed_limit"] == 16 << 30
    run("clear", "one", "--yes")
    assert not first.exists()
    assert second.exists()
    run("clear", "--yes")
    assert not list(packed_folder().iterdir())


def test_pull_prints_the_place_alone(tmp_path: Path) -> None:
    write_tiny(tmp_path / "shelf" / "mine")
    assert run("pull", "mine") == f"{tmp_path / 'shelf' / 'mine'}\n"


def test_inspect_tells_the_same_of_folder_and_gguf(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m", "llama3.2")
    path = write_gguf(folder, tmp_path / "m.gguf")
    ours, theirs = (json.loads(run("inspect", str(place), "--json")) for place in (folder, path))
    same = (
        "architecture",
        "layers",
        "heads",
        "kv_heads",
        "head_dim",
        "context",
        "kv_bytes_per_token_bf16",
        "vocabulary",
        "chat_template",
        "tied_head",
    )
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
    for name in ("bf16", "int8"):
        spec = AttnSpec(ours["heads"], ours["kv_heads"], ours["head_dim"], 1.0)
        assert ours[f"kv_bytes_per_token_{name}"] == KV_FORMATS[name].bytes_per_token(spec, ours["layers"])
    assert ours["eos_ids"][str(IM_END_ID)] == "<|im_end|>"
    assert list(ours["formats"]) == ["F32"]
    assert "kv bytes per token bf16" in run("inspect", str(folder))


def test_clear_removes_only_what_was_unpacked(tmp_path: Path) -> None:
    hub_file = tmp_path / "hub" / "models--a--b" / "blobs" / "x"
    hub_file.parent.mkdir(parents=True)
    hub_file.write_text("x")
    for name in ("one", "two"):
        (models_cache() / name).mkdir(parents=True)
        (models_cache() / name / "m.gguf").write_bytes(b"x" * 10)
    (models_cache() / "link").symlink_to(tmp_path / "hub")
    refused = CliRunner().invoke(app, ["clear"], input="n\n")
    assert refused.exit_code != 0
    assert (models_cache() / "one" / "m.gguf").exists()
    run("clear", "one", "--yes")
    assert not (models_cache() / "one").exists()
    assert (models_cache() / "two").exists()
    with pytest.raises(ConfigError, match=r"'\.\./hub' is not in .*two"):
        run("clear", "../hub", "--yes")
    run("clear", "--yes")
    assert not (models_cache() / "two").exists()
    assert hub_file.exists()
    assert run("clear", "--yes") == ""
