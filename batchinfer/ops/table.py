"""A device is a table of functions. The reference table is pure torch; devices replace entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from batchinfer.ops import reference
from batchinfer.ops.layouts import Dense, OneDnnBf16


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations that layers are given. See ops/reference.py for what each computes."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    argmax: Callable[[Tensor], Tensor]
    matmul: Mapping[type, Callable[[Tensor, Any], Tensor]]


REFERENCE = Ops(
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    silu_and_mul=reference.silu_and_mul,
    rotary=reference.rotary,
    argmax=reference.argmax,
    matmul={Dense: reference.dense_matmul, OneDnnBf16: reference.onednn_bf16_matmul},
)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which implementation serves an operation, and why."""

    operation: str
    chosen: str
    reason: str

    def __str__(self) -> str:
        return f"{self.operation}: {self.chosen} ({self.reason})"
