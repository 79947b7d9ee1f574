"""Fewer bits do not cost the default model more than they may."""

from __future__ import annotations

import math

import pytest
import torch

from batchinfer.build import open_model
from batchinfer.config import EngineConfig
from batchinfer.weights.source import ModelFiles
from tests.quant.perplexity import load, mean_loss, python_docs, windows_of

TOKENS, WINDOW = 3072, 512


@pytest.mark.model
def test_int8_keeps_perplexity_within_one_percent(smollm2: ModelFiles) -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("bf16 is compared with, which this processor does not multiply")
    handle = open_model(EngineConfig(model=str(smollm2.path), device="cpu"))
    windows = windows_of(handle, python_docs(), TOKENS, WINDOW)
    base, int8 = (mean_loss(load(handle, name), windows) for name in ("none", "int8"))
    assert abs(math.exp(int8 - base) - 1) < 0.01
