"""The few layouts that kernels are written for; checkpoint formats end in one of them at load."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Dense:
    """Plain weight [out, in] with an optional bias [out]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class OneDnnBf16:
    """A bf16 weight reordered once into oneDNN's blocked layout; opaque to torch's other operations."""

    packed: Tensor
    bias: Tensor | None


Layout = Dense | OneDnnBf16
