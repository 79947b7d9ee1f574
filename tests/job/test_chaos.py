"""The short form of the chaos harness; the long one is `python -m tests.job.chaos`."""

from __future__ import annotations

import pytest

from tests.job.chaos import disturb


@pytest.mark.parametrize("seed", range(4))
def test_a_disturbed_job_ends_as_an_undisturbed_one(seed: int) -> None:
    assert disturb(seed)
