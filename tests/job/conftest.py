"""What the tests of jobs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.job.test_harm import STARTED


@pytest.fixture(autouse=True)
def _no_process_outlives_its_test() -> Iterator[None]:
    """A job that a failed test did not see end would take a core from every test behind it."""
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()
