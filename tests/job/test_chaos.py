"""The short form of the chaos harness; the long one is `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.job.chaos import Model, disturb
from tests.oracle.tiny_models import write_tiny


@pytest.mark.parametrize("seed", range(5))
def test_a_disturbed_job_ends_as_an_undisturbed_one(seed: int) -> None:
    assert disturb(seed)


def test_with_a_real_model(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny", "llama3.2")
    assert disturb(8, Model("tiny", (f"--model={model}", "--dtype=float32"), 40), most=1)
