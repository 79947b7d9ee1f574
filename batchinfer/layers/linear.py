"""Linear layers: a weight packed once into a layout, and the product that the device's table names for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from batchinfer.layers.prepared import Form, Packing, Prepared, Tensors, with_bias
from batchinfer.layers.row_sizes import row_sizes
from batchinfer.ops.layouts import Dense, Int8Channel, Layout, OneDnnBf16
from batchinfer.ops.reference import dense_matmul, onednn_bf16_matmul
from batchinfer.ops.rotation import block_size, rotate
from batchinfer.ops.rows import Entry, Product
from batchinfer.ops.table import Ops
from batchinfer.remembered import Known

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


def _weight_of(tensors: Tensors) -> Tensor:
    return tensors["weight"]


def _shape_of(weight: Tensor) -> tuple[int, int]:
    return weight.shape[0], weight.shape[1]


def _finish_dense(tensors: Tensors) -> Dense:
    return Dense(_weight_of(tensors), tensors.get("bias"))


def _finish_float32(tensors: Tensors) -> Dense:
    weight = _weight_of(tensors)
    return Dense(weight, tensors.get("bias"), float32_sizes(_shape_of(weight)).value)


def _finish_onednn_bf16(tensors: Tensors) -> OneDnnBf16:
    weight = _weight_of(tensors)
    return OneDnnBf16(_reorder(weight), tensors.get("bias"), onednn_bf16_sizes(_shape_of(weight)).value)


def _finish_int8(tensors: Tensors) -> Int8Channel:
    packed: Tensor = torch.ops.onednn.qlinear_prepack(tensors["codes"], None)
    zero = torch.zeros(len(tensors["scale"]), dtype=torch.int32)
    return Int8Channel(packed, tensors["scale"], zero, tensors.get("bias"))


DENSE = Form("dense", _finish_dense, copies=False)
FLOAT32 = Form("float32", _finish_float32, copies=False)
ONEDNN_BF16 = Form("bf16", _finish_onednn_bf16, copies=True)
INT8 = Form("int8", _finish_int8, copies=True)


def _as_it_is(form: Form) -> Callable[[Tensor, Tensor | None], Prepared]:
    return lambda weight, bias: Prepared(form, with_bias(bias, weight=weight.contiguous()))


pack_dense = Packing(_as_it_is(DENSE))  # keeps the weight as it is
pack_float32 = Packing(_as_it_is(FLOAT32))  # the same for a CPU, with the numbers of rows at which the library sums alike
pack_onednn_bf16 = Packing(_as_it_is(ONEDNN_BF16))  # reordered for oneDNN's matrix kernels
WITHOUT_COPY = (pack_dense, pack_float32)  # a head that shares the table of embeddings takes no memory of its own


def float32_sizes(shape: tuple[int, int]) -> Known:
    """The sizes (`row_sizes`) of float32 products of `shape` (out, in)."""
    return row_sizes("float32", _float32_product, shape, torch.float32)


def _float32_product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return partial(dense_matmul, layout=Dense(weight, None))


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


def _to_int8(weight: Tensor, bias: Tensor | None, most: int) -> Prepared:
    """Rotate, then round each output's weights to 8 bits, symmetric, on the scale of its largest; best from float32."""
    codes, scale = int8_codes(weight, most)
    return Prepared(INT8, with_bias(None if bias is None else bias.float(), codes=codes, scale=scale))


pack_int8 = Packing(partial(_to_int8, most=INT8_MOST))
pack_int8_narrow = Packing(partial(_to_int8, most=INT8_MOST_NARROW))  # 7 bits, which no multiply-add can drive out of range


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
