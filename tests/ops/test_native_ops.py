"""Native operations on plain rows against the reference, and their independence of neighbours."""

from __future__ import annotations

import pytest
import torch

from batchinfer.ops import reference
from batchinfer.ops.table import Ops
from tests.ops.native_tables import VARIANTS, tables

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=VARIANTS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return tables(request.param)[0]


def plain(x: object) -> torch.Tensor:
    assert isinstance(x, torch.Tensor)
    return x


def close(got: object, expected: torch.Tensor) -> None:
    """Equal to the last place or two of the storage type."""
    rtol = 2e-6 if expected.dtype is torch.float32 else 1e-2
    got = plain(got)
    assert got.dtype is expected.dtype
    assert torch.allclose(got.float(), expected.float(), rtol=rtol, atol=rtol)
    if expected.dtype is torch.bfloat16:  # nearly every value rounds to the very same bf16
        assert float((got != expected).float().mean()) < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 576, 2048, 100])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_norms(ops: Ops, rows: int, size: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(rows + size)
    x, residual = (torch.randn(rows, size, generator=g).to(dtype) * 3 for _ in range(2))
    weight = torch.randn(size, generator=g).to(dtype)
    close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    for got, expected in zip(ops.add_rms_norm(x, residual, weight, 1e-5), reference.add_rms_norm(x, residual, weight, 1e-5), strict=True):
        close(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 1536, 24])
def test_gate(ops: Ops, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(33, 2 * size, generator=torch.Generator().manual_seed(1)) * 8
    x[0, :6] = torch.tensor([0.0, -0.0, 90.0, -90.0, 200.0, -200.0])
    close(ops.silu_and_mul(x.to(dtype)), reference.silu_and_mul(x.to(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_alone_and_in_company(ops: Ops, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(400, 576, generator=g).to(dtype)
    weight = torch.randn(576, generator=g).to(dtype)
    whole, gated = plain(ops.rms_norm(x, weight, 1e-5)), plain(ops.silu_and_mul(x))
    for rows in (slice(0, 1), slice(17, 20), slice(399, 400)):
        assert torch.equal(plain(ops.rms_norm(x[rows].clone(), weight, 1e-5)), whole[rows])
        assert torch.equal(plain(ops.silu_and_mul(x[rows].clone())), gated[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_stay_in_their_row(ops: Ops, dtype: torch.dtype, bad: float) -> None:
    x, residual, weight = torch.zeros(3, 64, dtype=dtype) + 1, torch.zeros(3, 64, dtype=dtype), torch.ones(64, dtype=dtype)
    x[1, 5] = bad
    for out in (ops.silu_and_mul(x), ops.rms_norm(x, weight, 1e-5), *ops.add_rms_norm(x, residual, weight, 1e-5)):
        assert torch.isfinite(plain(out)[[0, 2]]).all()
        assert not torch.isfinite(plain(out)[1]).all()


def test_every_nan_of_bf16_stays_a_nan(ops: Ops) -> None:
    """Rounding by adding must not carry a NaN with a full significand over into a number."""
    bits = torch.cat((torch.arange(0x7F81, 0x8000), torch.arange(0xFF81, 0x10000))).to(torch.int32)
    nans = bits.to(torch.int16).view(torch.bfloat16)[:, None].repeat(1, 32)
    assert nans.isnan().all()
    assert plain(ops.silu_and_mul(nans)).isnan().all()
    assert plain(ops.add_rms_norm(nans, torch.zeros_like(nans), torch.ones(32, dtype=torch.bfloat16), 1e-5)[1]).isnan().all()
