"""What every test shares: idle threads sleep (tests run beside each other), and the default model is fetched once."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported anywhere
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun in a script's background: the jobs under test would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import pytest

from batchinfer.weights.source import ModelFiles

# The same examples in every run: what fails here fails everywhere. HYPOTHESIS_PROFILE=explore looks for new ones.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.register_profile("explore", derandomize=False)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(scope="session")
def smollm2() -> ModelFiles:
    """The default model's files; skips, saying why, on a machine that has it neither cached nor within reach."""
    from batchinfer.errors import BatchInferError
    from batchinfer.weights.source import resolve_model

    try:
        return resolve_model("smollm2-135m")
    except BatchInferError as err:
        pytest.skip(f"the default model is not to be had here: {err}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
