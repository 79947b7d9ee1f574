"""Linear layers: a weight packed once into a layout, and the product that the device's table names for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from batchinfer.layers.row_sizes import row_sizes
from batchinfer.ops.layouts import Dense, Int8Channel, Layout, OneDnnBf16
from batchinfer.ops.reference import dense_matmul, onednn_bf16_matmul
from batchinfer.ops.rotation import block_size, rotate
from batchinfer.ops.rows import Entry, Product
from batchinfer.ops.table import Ops
from batchinfer.remembered import Known

Pack = Callable[[Tensor, Tensor | None], Layout]
"""(weight [out, in], bias [out] or None), on the run's device and in the dtype that the pack asks for -> layout.

Every output is packed for itself: packing some rows of a weight gives these rows' outputs, bit for bit.
"""

INT8_MOST = 127
INT8_MOST_NARROW = 63  # two products of 255 * 63 fit into 16 bits: for processors whose multiply-add saturates there


class Linear:
    """y = x W^T + b, without a branch: `Linear(x)` with x [T, in] gives [T, out]."""

    def __init__(self, layout: Layout, ops: Ops) -> None:
        self.layout = layout
        self._matmul = ops.matmul[type(layout)]

    def __call__(self, x: Entry) -> Product:
        """Multiply every row."""
        return self._matmul(x, self.layout)


def pack_dense(weight: Tensor, bias: Tensor | None) -> Dense:
    """Keep the weight as it is."""
    return Dense(weight.contiguous(), bias)


def pack_float32(weight: Tensor, bias: Tensor | None) -> Dense:
    """Keep a float32 weight as it is, for a CPU, and know at which numbers of rows the library sums alike."""
    return Dense(weight.contiguous(), bias, float32_sizes((weight.shape[0], weight.shape[1])).value)


def float32_sizes(shape: tuple[int, int]) -> Known:
    """The sizes (`row_sizes`) of float32 products of `shape` (out, in)."""
    return row_sizes("float32", _float32_product, shape, torch.float32)


def _float32_product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return partial(dense_matmul, layout=pack_dense(weight, None))


WITHOUT_COPY = (pack_dense, pack_float32)  # a head that shares the table of embeddings takes no memory of its own


def pack_onednn_bf16(weight: Tensor, bias: Tensor | None) -> OneDnnBf16:
    """Reorder a bf16 weight for oneDNN's matrix kernels, and know at which numbers of rows they sum alike."""
    return OneDnnBf16(_reorder(weight), bias, onednn_bf16_sizes((weight.shape[0], weight.shape[1])).value)


def onednn_bf16_sizes(shape: tuple[int, int]) -> Known:
    """The same of bf16 products in oneDNN."""
    return row_sizes("onednn bf16", _onednn_product, shape, torch.bfloat16)


def any_sizes(shape: tuple[int, int]) -> Known:
    """Of products whose sums do not depend on the number of rows."""
    return Known((), measured=False)


def _onednn_product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return partial(onednn_bf16_matmul, layout=OneDnnBf16(_reorder(weight), None))


def _reorder(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


def pack_int8(weight: Tensor, bias: Tensor | None) -> Int8Channel:
    """Rotate, then round each output's weights to 8 bits, symmetric, on the scale of its largest; best from float32."""
    return _pack_int8(weight, bias, INT8_MOST)


def pack_int8_narrow(weight: Tensor, bias: Tensor | None) -> Int8Channel:
    """As `pack_int8` with 7 bits, which no processor's 8-bit multiply-add can drive out of range."""
    return _pack_int8(weight, bias, INT8_MOST_NARROW)


def _pack_int8(weight: Tensor, bias: Tensor | None, most: int) -> Int8Channel:
    codes, scale = int8_codes(weight, most)
    packed: Tensor = torch.ops.onednn.qlinear_prepack(codes, None)
    zero = torch.zeros(len(scale), dtype=torch.int32)
    return Int8Channel(packed, scale, zero, None if bias is None else bias.float())


def int8_codes(weight: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """(int8 codes [out, in] up to `most`, float32 scales [out]) of a weight: rotate(weight)[o] / block = codes[o] * scale[o]."""
    weight = rotate(weight) / block_size(weight.shape[1])
    largest = weight.abs().amax(1)
    inverse = torch.where(largest > 0, most / largest, 0.0)
    return torch.round(weight * inverse[:, None]).to(torch.int8), largest / most


def fuse(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Several products of one input as one: rows below each other; absent biases are zero if any is there."""
    weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
    if all(bias is None for bias in biases):
        return weight, None
    parts = [weight.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
    return weight, torch.cat(parts)
