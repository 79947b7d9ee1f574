"""The operations between 8-bit products, in plain torch: they take scaled rows or plain ones, and give rows in 8 bits.

All arithmetic is float32 (norm weights too); the residual stream is rounded to its own dtype where it is stored.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer.ops.rows import Product, QuantRows, quantise_rows, to_dense


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> QuantRows:
    """x [T, H] scaled by its root mean square times weight float32 [H], in 8 bits."""
    return quantise_rows(_norm(x.float(), weight, eps))


def add_rms_norm(x: Product, residual: Tensor, weight: Tensor, eps: float) -> tuple[QuantRows, Tensor]:
    """(norm of x + residual in 8 bits, x + residual in residual's dtype); the norm reads the sum before it is rounded."""
    total = to_dense(x, torch.float32).float() + residual.float()
    return quantise_rows(_norm(total, weight, eps)), total.to(residual.dtype)


def silu_and_mul(gate_up: Product) -> QuantRows:
    """[T, 2 * I] -> silu(first half) * second half, in 8 bits."""
    gate, up = to_dense(gate_up, torch.float32).float().chunk(2, dim=-1)
    return quantise_rows(F.silu(gate) * up)


def enter(x: Tensor) -> QuantRows:
    """Rows [T, N] in 8 bits."""
    return quantise_rows(x)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
