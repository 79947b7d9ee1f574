"""A device is a table of functions. The reference table is pure torch; devices replace entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from batchinfer.ops import quantised, reference
from batchinfer.ops.layouts import Dense, GroupInt4, Int8Channel, OneDnnBf16, PanelInt4, TileBf16, TileInt8
from batchinfer.ops.rows import Entry, Product


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations that layers are given: one table per kind of arithmetic between the linear layers.

    See ops/reference.py for what each computes on plain rows, ops/quantised.py for what it computes around 8-bit products.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Entry]
    add_rms_norm: Callable[[Product, Tensor, Tensor, float], tuple[Entry, Tensor]]
    silu_and_mul: Callable[[Product], Entry]
    enter: Callable[[Tensor], Entry]
    matmul: Mapping[type, Callable[[Any, Any], Product]]


MATMUL: Mapping[type, Callable[[Any, Any], Product]] = {
    Dense: reference.dense_matmul,
    OneDnnBf16: reference.onednn_bf16_matmul,
    Int8Channel: reference.int8_matmul,
    GroupInt4: reference.int4_matmul,
    PanelInt4: reference.panel_int4_matmul,
    TileBf16: reference.tile_bf16_matmul,
    TileInt8: reference.tile_int8_matmul,
}

REFERENCE = Ops(
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    silu_and_mul=reference.silu_and_mul,
    enter=reference.enter,
    matmul=MATMUL,
)

REFERENCE_INT8 = Ops(
    rms_norm=quantised.rms_norm,
    add_rms_norm=quantised.add_rms_norm,
    silu_and_mul=quantised.silu_and_mul,
    enter=quantised.enter,
    matmul=MATMUL,
)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which implementation serves an operation, and why."""

    operation: str
    chosen: str
    reason: str

    def __str__(self) -> str:
        return f"{self.operation}: {self.chosen} ({self.reason})"
