"""Rows between 8-bit products: what goes into one, and what comes out before its scales are applied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.ops.rotation import rotate

ZERO_POINT = 128  # oneDNN's fast 8-bit product takes unsigned activations
SMALLEST = 1e-30  # rows whose largest entry is below count as 0: its inverse could be infinite


@dataclass(frozen=True, slots=True)
class QuantRows:
    """Rows in 8 bits with a scale each, rotated for the sake of precision: rotate(x)[t] = (values[t] - 128) * scale[t]."""

    values: Tensor  # uint8 [T, N]
    scale: Tensor  # float32 [T]


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """An 8-bit product's result: y[t] = values[t] * scale[t] + bias. The next operation applies scale and bias."""

    values: Tensor  # float32 [T, N]
    scale: Tensor  # float32 [T]
    bias: Tensor | None  # float32 [N]

    def index_select(self, dim: int, index: Tensor) -> ScaledRows:
        """Some of the rows, as `Tensor.index_select(0, index)` gives them."""
        assert dim == 0
        return ScaledRows(self.values.index_select(0, index), self.scale.index_select(0, index), self.bias)


Entry = Tensor | QuantRows
"""What a linear layer reads: [T, in]."""

Product = Tensor | ScaledRows
"""What a linear layer gives: [T, out]."""


def to_dense(product: Product, dtype: torch.dtype) -> Tensor:
    """The product as plain rows [T, N], scales and bias applied."""
    if isinstance(product, Tensor):
        return product
    rows = product.values * product.scale[:, None]
    return (rows if product.bias is None else rows + product.bias).to(dtype)


def quantise_rows(x: Tensor) -> QuantRows:
    """x [T, N] rotated, then to 8 bits, symmetric, on the scale of the largest; a row with NaN or infinity has no finite scale."""
    wide = rotate(x)
    largest = wide.abs().amax(-1)
    inverse = torch.where(largest > SMALLEST, 127.0 / largest, 0.0)
    codes = torch.round(wide * inverse[:, None]).nan_to_num_(0.0).add_(ZERO_POINT)
    return QuantRows(codes.to(torch.uint8), largest / 127.0)
