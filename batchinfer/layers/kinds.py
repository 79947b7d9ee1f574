"""The kinds of linear layers that a run can choose: how weights are packed, and the arithmetic between their products."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from batchinfer.errors import BackendError
from batchinfer.layers.int4 import GROUPS, PANELS, can_pack_int4, pack_int4, pack_int4_panels
from batchinfer.layers.linear import (
    DENSE,
    FLOAT32,
    INT8,
    ONEDNN_BF16,
    any_sizes,
    float32_sizes,
    onednn_bf16_sizes,
    pack_dense,
    pack_float32,
    pack_int8,
    pack_int8_narrow,
    pack_onednn_bf16,
)
from batchinfer.layers.linear_check import int8_product_saturates
from batchinfer.layers.prepared import Form, Packing, Prepared
from batchinfer.layers.tiles import TILES_BF16, TILES_INT8, pack_tile_bf16, pack_tile_int8
from batchinfer.ops.native.int4 import can_multiply_int4
from batchinfer.ops.native.linear_amx import can_multiply_tiles
from batchinfer.ops.table import Choice
from batchinfer.remembered import Known

log = logging.getLogger(__name__)

Rows = Literal["plain", "int8"]


@dataclass(frozen=True, slots=True)
class LinearKind:
    """One kind of linear layer.

    `rows` names the table of operations that serves between the products: `plain` rows in the run's dtype, or rows in
    `int8`. Both packs take float weights of `weight_dtype`; the head may be sliced by outputs before it is packed.
    """

    name: str  # as --quantization spells it
    rows: Rows
    weight_dtype: torch.dtype
    pack: Packing
    head_pack: Packing
    sizes: Callable[[tuple[int, int]], Known] = any_sizes  # what a pack wants to know of a shape (out, in), found out beforehand


def choose_linear(
    quantization: str, device: torch.device, dtype: torch.dtype, library: ctypes.CDLL | None = None
) -> tuple[LinearKind, Choice]:
    """The kind that `quantization` (none, int8, int4) names here, and why; `BackendError` says what cannot be.

    `library`: the native one, whose table of operations will serve.
    """
    if quantization == "none":
        return _plain(device, dtype, library)
    if device.type != "cpu":
        raise BackendError(f"--quantization {quantization} is for CPUs in this version; use --quantization none on {device.type}")
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        raise BackendError(f"--quantization {quantization}: this torch was built without oneDNN; use --quantization none")
    return _int8(library) if quantization == "int8" else _int4(dtype, library)


def _plain(device: torch.device, dtype: torch.dtype, library: ctypes.CDLL | None) -> tuple[LinearKind, Choice]:
    if device.type == "cpu" and dtype is torch.bfloat16:
        if _has_tiles(library):
            choice = Choice("matmul", "native, bf16 in matrix registers (AMX)", "float32 accumulation, in one order for any number of rows")
            return LinearKind("none", "plain", dtype, pack_tile_bf16, pack_tile_bf16), choice
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            choice = Choice("matmul", "oneDNN, prepacked bf16", "float32 accumulation")
            return LinearKind("none", "plain", dtype, pack_onednn_bf16, pack_onednn_bf16, onednn_bf16_sizes), choice
        raise BackendError("--dtype bf16: this processor cannot multiply bf16 through oneDNN; use --dtype float32")
    choice = Choice("matmul", f"torch, {'bf16' if dtype is torch.bfloat16 else 'float32'}", "the device's own library")
    if device.type != "cpu":
        return LinearKind("none", "plain", dtype, pack_dense, pack_dense), choice
    return LinearKind("none", "plain", dtype, pack_float32, pack_float32, float32_sizes), choice


def _has_tiles(library: ctypes.CDLL | None) -> bool:
    return library is not None and can_multiply_tiles(library)


def _int8(library: ctypes.CDLL | None) -> tuple[LinearKind, Choice]:
    exact = "exact sums in int32, a scale per output and per token"
    if _has_tiles(library):
        kind = LinearKind("int8", "int8", torch.float32, pack_tile_int8, pack_tile_int8)
        return kind, Choice("matmul", "native, int8 in matrix registers (AMX)", exact)
    if int8_product_saturates(pack_int8):
        if int8_product_saturates(pack_int8_narrow):
            raise BackendError("--quantization int8: oneDNN's 8-bit product is wrong on this processor; use --quantization none")
        choice = Choice(
            "matmul", "oneDNN, int8 with 7-bit weights", "this processor's multiply-add saturates with 8; costs some 1 % of perplexity"
        )
        return LinearKind("int8", "int8", torch.float32, pack_int8_narrow, pack_int8_narrow), choice
    choice = Choice("matmul", "oneDNN, int8", exact)
    return LinearKind("int8", "int8", torch.float32, pack_int8, pack_int8), choice


def _int4(dtype: torch.dtype, library: ctypes.CDLL | None) -> tuple[LinearKind, Choice]:
    native = library is not None and can_multiply_int4(library)
    pack_groups = pack_int4_panels if native else pack_int4
    otherwise, _ = _plain(torch.device("cpu"), dtype, library)
    # A head in 4 bits alone would cost 5 % of perplexity (SmolLM2-135M); in 8 bits it costs next to nothing.
    head, head_choice = _int8(library)

    def prepare(weight: Tensor, bias: Tensor | None) -> Prepared:
        if can_pack_int4(weight):
            return pack_groups.prepare(weight, bias)
        log.info("a linear layer of %d x %d stays in %s: its sizes do not suit the 4-bit kernels", *weight.shape, dtype)
        return otherwise.pack.prepare(weight.to(dtype), None if bias is None else bias.to(dtype))

    chosen = f"{'native' if native else 'torch'}, int4; head: {head_choice.chosen}"
    reason = "groups of 32 inputs, widened to bf16 on the way" if native else "the native kernel needs AVX-512 with BF16"
    return LinearKind("int4", "plain", torch.float32, Packing(prepare), head.pack), Choice("matmul", chosen, reason)


QUANTIZATIONS = ("none", "int8", "int4")
FORMS: dict[str, Form] = {form.name: form for form in (DENSE, FLOAT32, ONEDNN_BF16, INT8, GROUPS, PANELS, TILES_BF16, TILES_INT8)}
