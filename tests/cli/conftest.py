from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from batchinfer.__main__ import run_command
from tests.oracle.tiny_models import write_tiny


@dataclass(frozen=True)
class Said:
    """What a command line printed, and its exit code."""

    code: int
    out: str
    err: str


Cli = Callable[..., Said]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny", "llama3.2")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def call(*args: str) -> Said:
        code = run_command([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    return call


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured rates and verdicts of these tests stay out of the user's cache."""
    monkeypatch.setenv("BATCHINFER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
