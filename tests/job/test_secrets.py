"""A token in the environment stays there: no file of a job and nothing it says holds it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracle.tiny_models import write_tiny

TOKEN = "hf_aVeryPrivateTokenOfSomebody"


@pytest.mark.parametrize("flags", [(), ("--strict",), ("--dtype", "nonsense")], ids=["finished", "stopped", "refused"])
def test_the_hub_token_shows_nowhere(tmp_path: Path, flags: tuple[str, ...]) -> None:
    model = write_tiny(tmp_path / "model", "llama2")
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "in.jsonl").write_text('{"prompt": "the"}\n{"prompt": 5}\n')
    command = [
        sys.executable,
        "-m",
        "batchinfer",
        "run",
        str(folder / "in.jsonl"),
        "-m",
        str(model),
        "-o",
        str(folder / "o.jsonl"),
        "--max-tokens",
        "2",
    ]
    environment = {**os.environ, "HF_TOKEN": TOKEN, "HUGGING_FACE_HUB_TOKEN": TOKEN, "BATCHINFER_CACHE": str(tmp_path / "cache")}
    ended = subprocess.run([*command, *flags], capture_output=True, env=environment, timeout=400, check=False)
    assert ended.returncode in (1, 2, 3)
    assert TOKEN.encode() not in ended.stdout + ended.stderr
    written = [path for root in (folder, tmp_path / "cache") for path in root.rglob("*") if path.is_file()]
    assert len(written) > 1 or flags
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]
