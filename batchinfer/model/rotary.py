"""Rotary position tables (Su et al., arXiv:2104.09864) with Llama 3.1's stretching of slow frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from batchinfer.model.config import Llama3Scaling, RotarySpec


def inverse_frequencies(spec: RotarySpec, head_dim: int) -> Tensor:
    """Radians per position of each pair, float32 [head_dim / 2]."""
    inverse = 1.0 / (spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if spec.freq_factors is not None:
        return inverse / torch.tensor(spec.freq_factors, dtype=torch.float32)
    return inverse if spec.scaling is None else _llama3(inverse, spec.scaling)


def _llama3(inverse: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide slow frequencies by `factor`, keep fast ones, blend between (Llama 3.1 reference implementation)."""
    wavelength = 2 * math.pi / inverse
    long = scaling.original_max_position / scaling.low_freq_factor
    short = scaling.original_max_position / scaling.high_freq_factor
    blend = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    stretched = torch.where(wavelength > long, inverse / scaling.factor, inverse)
    middle = (1 - blend) * inverse / scaling.factor + blend * inverse
    return torch.where((wavelength >= short) & (wavelength <= long), middle, stretched)


class RotaryTable:
    """cos and sin of every position up to the context's end, float32 [positions, 1, head_dim / 2]."""

    def __init__(self, spec: RotarySpec, head_dim: int, num_positions: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse_frequencies(spec, head_dim))
        self.cos = angles.cos()[:, None].to(device)
        self.sin = angles.sin()[:, None].to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows for positions int64 [T]: float32 [T, 1, head_dim / 2] each."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)
