"""Native row-wise operations against the reference, and their independence of neighbours."""

from __future__ import annotations

import pytest
import torch

from batchinfer.ops import reference
from batchinfer.ops.native.library import load_native
from batchinfer.ops.native.rowwise import native_ops
from batchinfer.ops.table import Ops

NATIVE = load_native()
pytestmark = pytest.mark.skipif(NATIVE.library is None, reason=NATIVE.reason)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def ops() -> Ops:
    assert NATIVE.library is not None
    return native_ops(NATIVE.library)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to the last place or two of the storage type."""
    rtol = 2e-6 if expected.dtype is torch.float32 else 1e-2
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
    whole, gated = ops.rms_norm(x, weight, 1e-5), ops.silu_and_mul(x)
    for rows in (slice(0, 1), slice(17, 20), slice(399, 400)):
        assert torch.equal(ops.rms_norm(x[rows].clone(), weight, 1e-5), whole[rows])
        assert torch.equal(ops.silu_and_mul(x[rows].clone()), gated[rows])


def test_nan_and_infinity_pass_through(ops: Ops) -> None:
    x = torch.zeros(3, 32)
    x[1, 5] = torch.nan
    x[2, 5] = torch.inf
    out = ops.silu_and_mul(x + 1)
    assert torch.isfinite(out[0]).all()
    assert not torch.isfinite(out[1]).all()
    assert not torch.isfinite(out[2]).all()
