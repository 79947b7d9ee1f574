"""Packed linear layers: what they compute, that a slice of one is the same as a slice of its result, and the self-tests."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from batchinfer.errors import BackendError
from batchinfer.layers.kinds import LinearKind, choose_linear
from batchinfer.layers.linear import Linear, fuse, pack_int8, pack_int8_narrow
from batchinfer.layers.linear_check import differing_row_counts, int8_product_saturates
from batchinfer.ops.layouts import Int8Channel
from batchinfer.ops.native.int4 import can_multiply_int4
from batchinfer.ops.native.library import load_native
from batchinfer.ops.native.linear_amx import can_multiply_tiles
from batchinfer.ops.native.rowwise import native_int8_ops, native_ops
from batchinfer.ops.reference import int8_matmul
from batchinfer.ops.rows import ZERO_POINT, Entry, QuantRows, quantise_rows, to_dense
from batchinfer.ops.table import REFERENCE, REFERENCE_INT8, Ops

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float32]
TOLERANCE = {
    "none": 0.005,
    "none native": 0.005,
    "int8": 0.02,
    "int8 native": 0.02,
    "int4": 0.2,
    "int4 native": 0.2,
}  # of the result's norm
NAMES = tuple(TOLERANCE)
NATIVE = {"none native": can_multiply_tiles, "int8 native": can_multiply_tiles, "int4 native": can_multiply_int4}


@dataclass(frozen=True)
class Setting:
    kind: LinearKind
    table: Ops

    def entry(self, x: Tensor) -> Entry:
        return quantise_rows(x) if self.kind.rows == "int8" else x

    def product(self, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        weight, bias = weight.to(self.kind.weight_dtype), None if bias is None else bias.to(self.kind.weight_dtype)
        return to_dense(Linear(self.kind.pack(weight, bias), self.table)(self.entry(x)), x.dtype)


def setting_of(name: str, dtype: torch.dtype) -> Setting:
    library = load_native().library if name.endswith("native") else None
    if name.endswith("native") and (library is None or not NATIVE[name](library)):
        pytest.skip("no such native product here")
    try:
        kind, _ = choose_linear(name.split()[0], CPU, dtype, library)
    except BackendError as err:
        pytest.skip(str(err))
    if library is None:
        table = REFERENCE_INT8 if kind.rows == "int8" else REFERENCE
    else:
        table = native_int8_ops(library) if kind.rows == "int8" else native_ops(library)
    return Setting(kind, table)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(960, 576), (48, 1536), (300, 160), (16, 32), (40, 48)])
def test_products(name: str, dtype: torch.dtype, shape: tuple[int, int], with_bias: bool) -> None:
    g = torch.Generator().manual_seed(shape[0])
    setting = setting_of(name, dtype)
    weight, x = torch.randn(shape, generator=g), torch.randn(9, shape[1], generator=g).to(dtype)
    bias = torch.randn(shape[0], generator=g) * 10 if with_bias else None
    got = setting.product(weight, bias, x)
    expected = x.float() @ weight.T + (0 if bias is None else bias)
    assert got.dtype is dtype
    assert (got.float() - expected).norm() < TOLERANCE[name] * expected.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_weight_packed_alone_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """The head is packed in slices of the vocabulary."""
    g = torch.Generator().manual_seed(1)
    setting = setting_of(name, dtype)
    weight, x = torch.randn(512, 576, generator=g), torch.randn(16, 576, generator=g).to(dtype)
    whole = setting.product(weight, None, x)
    for start, end in ((0, 64), (64, 320), (496, 512)):
        assert torch.equal(setting.product(weight[start:end], None, x), whole[:, start:end])


@pytest.mark.parametrize("name", NAMES)
def test_neither_packing_nor_products_depend_on_threads(name: str) -> None:
    setting = setting_of(name, torch.bfloat16)
    weight = torch.randn(3072, 576, generator=torch.Generator().manual_seed(2)).to(setting.kind.weight_dtype)
    x = torch.randn(8, 576).bfloat16()
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            layout = setting.kind.pack(weight, None)
            results.append(to_dense(Linear(layout, setting.table)(setting.entry(x)), torch.float32))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (3072, 576), (100, 96)])
def test_a_row_is_the_same_in_every_number_of_rows(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    setting = setting_of(name, dtype)
    for pack in (setting.kind.pack, setting.kind.head_pack):
        assert differing_row_counts(pack, setting.table, shape, dtype) == []


def test_int8_products_are_exact() -> None:
    """Integer sums, whatever the codes; then one multiplication by the output's scale."""
    g = torch.Generator().manual_seed(3)
    weight = torch.randn(64, 1536, generator=g)
    layout = pack_int8(weight, None) if not int8_product_saturates(pack_int8) else pack_int8_narrow(weight, None)
    codes = _codes(layout, 1536)
    x = torch.randint(0, 256, (33, 1536), generator=g, dtype=torch.uint8)
    got = int8_matmul(QuantRows(x, torch.ones(33)), layout).values
    exact = (x.long() - ZERO_POINT) @ codes.T
    assert torch.equal(got, exact.float() * layout.scale)


def _codes(layout: Int8Channel, size: int) -> Tensor:
    """The weight's codes, read off products with rows of a single step each."""
    rows = torch.full((size, size), ZERO_POINT, dtype=torch.uint8) + torch.eye(size, dtype=torch.uint8)
    return torch.round(int8_matmul(QuantRows(rows, torch.ones(size)), layout).values / layout.scale).long().T


def test_constant_and_zero_weights() -> None:
    weight = torch.zeros(32, 64)
    weight[1] = 0.25
    for name in NAMES:
        got = setting_of(name, torch.float32).product(weight, None, torch.ones(2, 64))
        torch.testing.assert_close(got, torch.ones(2, 64) @ weight.T, rtol=1e-2, atol=1e-6)


@pytest.mark.skipif(sys.platform != "linux", reason="needs oneDNN on x86")
@pytest.mark.parametrize("most", ["AVX2", "AVX512_CORE"])
def test_saturating_processors_are_noticed_and_get_narrow_weights(most: str) -> None:
    """oneDNN held to instructions without VNNI adds two 8-bit products in 16 bits: the choice must not trust it."""
    code = (
        "import torch; from batchinfer.layers.kinds import choose_linear; from batchinfer.layers.linear import *;"
        "from batchinfer.layers.linear_check import int8_product_saturates as s;"
        "kind, choice = choose_linear('int8', torch.device('cpu'), torch.float32);"
        "print(s(pack_int8), s(kind.pack), choice)"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": most, "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment).stdout
    saturates, still, choice = out.split(maxsplit=2)
    assert still == "False"
    assert ("7-bit" in choice) == (saturates == "True")


def test_quantised_kinds_are_refused_elsewhere_than_on_cpus() -> None:
    for name in ("int8", "int4"):
        with pytest.raises(BackendError, match=f"--quantization {name}"):
            choose_linear(name, torch.device("cuda"), torch.bfloat16)


def test_fused_parts_stand_below_each_other() -> None:
    a, b = torch.ones(2, 3), torch.zeros(1, 3)
    weight, bias = fuse([a, b], [None, torch.ones(1)])
    assert torch.equal(weight, torch.cat((a, b)))
    assert bias is not None
    assert bias.tolist() == [0, 0, 1]
    assert fuse([a], [None])[1] is None
