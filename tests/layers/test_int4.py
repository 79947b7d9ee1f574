"""4-bit groups: what they keep exactly, and how far off the rest may be."""

from __future__ import annotations

import logging

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from batchinfer.layers.int4 import GROUP, pack_int4, pack_int4_panels
from batchinfer.layers.kinds import choose_linear
from batchinfer.model.config import read_model_config
from batchinfer.model.load import iter_weights
from batchinfer.ops.layouts import Dense
from batchinfer.ops.reference import int4_matmul, panel_int4_matmul
from batchinfer.weights.source import ModelFiles

# What rounding the grids leaves, in steps: torch's kernel has bf16 ones, the native one float16 as GGUF files.
KERNELS = {"torch": 0.15, "native": 5e-3}


def values(weight: Tensor, kernel: str) -> Tensor:
    """The weight as it is held, read off the products of unit rows."""
    rows = torch.eye(weight.shape[1])
    if kernel == "torch":
        return int4_matmul(rows, pack_int4(weight, None)).T
    return panel_int4_matmul(rows, pack_int4_panels(weight, None)).T


def error_in_steps(weight: Tensor, kernel: str) -> float:
    """How far the packed weight is off at most, in steps of its groups' grids (the coarsest that could hold them)."""
    groups = weight.view(len(weight), -1, GROUP)
    step = (groups.amax(-1).clamp_min(0) - groups.amin(-1).clamp_max(0)).clamp_min(1e-9) / 15
    off = (values(weight, kernel) - weight).view(groups.shape)
    return float((off.abs() / step[..., None]).max())


def dequantised(kind: str, weight: np.ndarray) -> Tensor:
    kind_id = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight, kind_id), kind_id))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_gguf_groups_keep_their_codes(kind: str, kernel: str) -> None:
    weight = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32) * 0.05
    weight[3] = 0
    weight[4, :32] = 0.02
    assert error_in_steps(dequantised(kind, weight), kernel) < KERNELS[kernel]


@pytest.mark.parametrize("kernel", KERNELS)
def test_groups_that_do_not_use_all_steps_keep_their_grid(kernel: str) -> None:
    """As files made with an importance matrix have them: the least and the most are not the ends of the grid."""
    g = torch.Generator().manual_seed(1)
    codes = torch.randint(2, 14, (64, 16, GROUP), generator=g).float()
    codes[0] = codes[0] // 3 * 3  # three steps apart at least
    codes[1, :, 1:] = codes[1, :, :1]  # one value
    codes[2] = torch.tensor([2.0, 7.0, 9.0, 14.0])[torch.randint(4, (16, GROUP), generator=g)]
    step = (torch.rand(64, 16, 1, generator=g) * 0.1 + 0.01).half().float()
    least = (-step * (6 + 3 * torch.rand(64, 16, 1, generator=g))).half().float()
    assert error_in_steps((codes * step + least).view(64, 512), kernel) < max(0.02, KERNELS[kernel])


@pytest.mark.model
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_default_models_file_keeps_its_weights(smollm2: ModelFiles, kernel: str) -> None:
    """The first layer's, up to the rounding of grids."""
    for name, tensor in iter_weights(smollm2, read_model_config(smollm2)):
        if name == "layers.1.attn_norm.weight":
            break
        if tensor.dim() == 2 and name != "embed.weight":
            assert error_in_steps(tensor, kernel) < KERNELS[kernel], name


@pytest.mark.parametrize("kernel", KERNELS)
def test_other_weights_are_rounded_to_the_nearest_step(kernel: str) -> None:
    weight = torch.randn(64, 576, generator=torch.Generator().manual_seed(2))
    assert 0.49 < error_in_steps(weight, kernel) < 0.6


def test_layers_of_other_sizes_stay_as_they_are_aloud(caplog: pytest.LogCaptureFixture) -> None:
    kind, _ = choose_linear("int4", torch.device("cpu"), torch.float32)
    with caplog.at_level(logging.INFO):
        layout = kind.pack(torch.ones(32, 40), None)
    assert isinstance(layout, Dense)
    assert "32 x 40 stays in" in caplog.text
