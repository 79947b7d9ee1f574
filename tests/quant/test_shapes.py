"""Quantised decoders of every shape of the family against the same decoder in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from batchinfer.build import open_model
from batchinfer.config import EngineConfig
from batchinfer.errors import BackendError
from tests.oracle.tiny_models import SHAPES, write_tiny
from tests.quant.perplexity import Model, hidden_states, load

IDS = torch.tensor([[5, 17, 200, 3, 99, 42, 7, 150] * 4])
TOLERANCE = {"int8": 0.08, "int4": 0.6}  # of the logits' norm: weights are random and large, so that errors grow from layer to layer


@torch.inference_mode()
def logits(model: Model) -> Tensor:
    return model.head.logits(hidden_states(model, IDS))


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("shape", [*SHAPES])
def test_quantised_logits_are_near(tmp_path: Path, shape: str, dtype: str) -> None:
    handle = open_model(EngineConfig(model=str(write_tiny(tmp_path / "m", shape)), device="cpu"))
    exact = logits(load(handle, "none", "float32"))
    for name, tolerance in TOLERANCE.items():
        try:
            got = logits(load(handle, name, dtype))
        except BackendError as err:
            pytest.skip(str(err))
        assert (got - exact).norm() < tolerance * exact.norm(), name
