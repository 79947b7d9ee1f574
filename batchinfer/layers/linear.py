"""Linear layers: a weight packed once into a layout, and the product that the device's table names for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from batchinfer.ops.layouts import Dense, Layout, OneDnnBf16
from batchinfer.ops.table import Ops

Pack = Callable[[Tensor, Tensor | None], Layout]
"""(weight [out, in], bias [out] or None), in the run's dtype and on its device -> layout."""


class Linear:
    """y = x W^T + b, without a branch: `Linear(x)` with x [T, in] gives [T, out]."""

    def __init__(self, layout: Layout, ops: Ops) -> None:
        self.layout = layout
        self._matmul = ops.matmul[type(layout)]

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply every row."""
        out: Tensor = self._matmul(x, self.layout)
        return out


def pack_dense(weight: Tensor, bias: Tensor | None) -> Dense:
    """Keep the weight as it is."""
    return Dense(weight.contiguous(), bias)


def pack_onednn_bf16(weight: Tensor, bias: Tensor | None) -> OneDnnBf16:
    """Reorder a bf16 weight for oneDNN's matrix kernels."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return OneDnnBf16(packed, bias)


def fuse(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Several products of one input as one: rows below each other; absent biases are zero if any is there."""
    weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
    if all(bias is None for bias in biases):
        return weight, None
    parts = [weight.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
    return weight, torch.cat(parts)
