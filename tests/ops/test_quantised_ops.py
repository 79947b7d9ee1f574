"""Operations around 8-bit products: the native ones against the reference, and the reference against plain arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchinfer.ops import quantised, reference
from batchinfer.ops.rotation import block_size, rotate
from batchinfer.ops.rows import ZERO_POINT, Entry, Product, QuantRows, ScaledRows, quantise_rows, to_dense
from batchinfer.ops.table import REFERENCE_INT8, Ops
from tests.ops.native_tables import VARIANTS, tables

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5


@pytest.fixture(scope="module", params=("reference", *VARIANTS))
def ops(request: pytest.FixtureRequest) -> Ops:
    return REFERENCE_INT8 if request.param == "reference" else tables(request.param)[1]


def product(kind: str, rows: int, size: int, dtype: torch.dtype, seed: int = 0) -> Product:
    """What an 8-bit linear layer leaves behind (with or without bias), or what another layer gives."""
    g = torch.Generator().manual_seed(seed + rows + size)
    values = torch.randn(rows, size, generator=g) * 3
    if kind == "plain":
        return values.to(dtype)
    return ScaledRows(values, torch.rand(rows, generator=g) + 0.1, torch.randn(size, generator=g) if kind == "bias" else None)


def quantised_rows(x: Entry) -> QuantRows:
    assert isinstance(x, QuantRows)
    assert x.values.dtype is torch.uint8
    assert x.scale.dtype is torch.float32
    return x


def walsh_hadamard(x: Tensor) -> Tensor:
    """By the definition, one stage after another: neighbours at a distance become their sum and their difference."""
    block, step = next(n for n in (64, 32, 16, 8, 4) if x.shape[1] % n == 0), 1
    while step < block:
        pairs = x.reshape(len(x), -1, 2, step)
        x = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), dim=2).reshape(x.shape)
        step *= 2
    return x


def close(got: Entry, expected: Tensor) -> None:
    """`got` is `expected` (float32), rotated, on the grid of its rows' largest entries, each rounded to the nearest step."""
    got = quantised_rows(got)
    rotated = walsh_hadamard(expected.double())
    torch.testing.assert_close(got.scale, (rotated.abs().amax(1) / 127).float(), rtol=1e-6, atol=0)
    steps = rotated / got.scale.double()[:, None]
    assert (steps - (got.values.double() - ZERO_POINT)).abs().max() <= 0.5 + 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "scaled", "bias"])
@pytest.mark.parametrize("rows,size", [(1, 576), (7, 2048), (300, 576), (5, 16), (3, 100), (70, 48)])
def test_add_and_norm(ops: Ops, rows: int, size: int, kind: str, dtype: torch.dtype) -> None:
    x = product(kind, rows, size, dtype)
    g = torch.Generator().manual_seed(9)
    residual, weight = torch.randn(rows, size, generator=g).to(dtype) * 2, torch.randn(size, generator=g)
    got, total = ops.add_rms_norm(x, residual, weight, EPS)
    wide = to_dense(x, torch.float32).double() + residual.double()
    assert total.dtype is dtype
    torch.testing.assert_close(total.double(), wide, rtol=1e-6 if dtype is torch.float32 else 2**-8, atol=1e-6)
    close(got, (wide * (wide.pow(2).mean(1, keepdim=True) + EPS).rsqrt() * weight).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [576, 100])
def test_norm_alone(ops: Ops, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(33, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = torch.rand(size, generator=torch.Generator().manual_seed(2))
    close(ops.rms_norm(x, weight, EPS), reference.rms_norm(x.float(), weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "scaled", "bias"])
@pytest.mark.parametrize("rows,size", [(1, 1536), (300, 1536), (5, 16), (3, 24), (9, 160)])
def test_gate(ops: Ops, rows: int, size: int, kind: str, dtype: torch.dtype) -> None:
    x = product(kind, rows, 2 * size, dtype)
    gate, up = to_dense(x, torch.float32).float().chunk(2, dim=1)
    close(ops.silu_and_mul(x), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,size", [(1, 576), (300, 576), (6, 40)])
def test_enter(ops: Ops, rows: int, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(4)).to(dtype)
    close(ops.enter(x), x.float())


def test_zero_rows_are_zero(ops: Ops) -> None:
    x = torch.zeros(3, 64)
    x[1] = 1e-38
    x[2] = 1.0
    got = quantised_rows(ops.enter(x))
    assert (got.values[:2] == ZERO_POINT).all()
    assert (got.scale[:2] < 1e-30).all()
    assert (got.values[2] == torch.tensor([255] + 63 * [ZERO_POINT])).all()  # all in one place: rows of the transform are orthogonal


def test_a_row_is_the_same_alone_and_in_company(ops: Ops) -> None:
    x = product("bias", 400, 1152, torch.bfloat16)
    assert isinstance(x, ScaledRows)
    assert x.bias is not None
    residual, weight = torch.randn(400, 1152).bfloat16(), torch.randn(1152)
    whole = [ops.silu_and_mul(x), *ops.add_rms_norm(x, residual, weight, EPS), ops.enter(residual)]
    for start, end in ((0, 1), (17, 20), (399, 400)):
        part = ScaledRows(x.values[start:end].clone(), x.scale[start:end].clone(), x.bias)
        own = residual[start:end].clone()
        alone = [ops.silu_and_mul(part), *ops.add_rms_norm(part, own, weight, EPS), ops.enter(own)]
        for one, all_rows in zip(alone, whole, strict=True):
            if isinstance(one, QuantRows):
                assert isinstance(all_rows, QuantRows)
                assert torch.equal(one.values, all_rows.values[start:end])
                assert torch.equal(one.scale, all_rows.scale[start:end])
            else:
                assert isinstance(all_rows, Tensor)
                assert torch.equal(one, all_rows[start:end])


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_a_bad_number_spoils_its_row_alone(ops: Ops, bad: float) -> None:
    values = torch.ones(3, 64)
    values[1, 40] = bad  # in `up`, for the gate
    x, residual, weight = ScaledRows(values, torch.ones(3), None), torch.zeros(3, 64), torch.ones(64)
    for out in (ops.silu_and_mul(x), ops.add_rms_norm(x, residual, weight, EPS)[0], ops.enter(values), ops.rms_norm(values, weight, EPS)):
        rows = quantised_rows(out)
        assert torch.isfinite(rows.scale[[0, 2]]).all()
        assert not torch.isfinite(rows.scale[1])
    spoiled = ScaledRows(torch.ones(3, 64), torch.tensor([1.0, bad, 1.0]), None)  # as the next product hands it on
    out = quantised_rows(ops.add_rms_norm(spoiled, residual, weight, EPS)[0])
    assert torch.equal(torch.isfinite(out.scale), torch.tensor([True, False, True]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_native_and_reference_choose_the_same_codes(variant: str) -> None:
    """Up to values within rounding error of the middle between two steps."""
    native = tables(variant)[1]
    x = product("bias", 200, 3072, torch.bfloat16)
    ours, theirs = quantised_rows(native.silu_and_mul(x)), quantised.silu_and_mul(x)
    differ = ours.values.int() - theirs.values.int()
    assert differ.abs().max() <= 1
    assert float((differ != 0).float().mean()) < 1e-4
    torch.testing.assert_close(ours.scale, theirs.scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [300, 64, 576])
def test_codes_and_scale_give_the_row_back(size: int) -> None:
    """The transform is its own inverse, up to the size of its blocks."""
    x = torch.randn(50, size, generator=torch.Generator().manual_seed(5))
    rows = quantise_rows(x)
    back = rotate((rows.values.float() - ZERO_POINT) * rows.scale[:, None]) / block_size(size)
    assert (back - x).norm() < 0.01 * x.norm()


def test_an_outlier_does_not_silence_its_block() -> None:
    x = torch.randn(20, 576, generator=torch.Generator().manual_seed(6))
    x[:, 7] = 100.0
    rows = quantise_rows(x)
    back = rotate((rows.values.float() - ZERO_POINT) * rows.scale[:, None]) / block_size(576)
    plain = torch.round(x / (100 / 127)) * (100 / 127)
    assert (back - x).norm() < 0.25 * (plain - x).norm()
