"""The native 4-bit product against its reference, and its independence of neighbours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from batchinfer.layers.int4 import pack_int4_panels
from batchinfer.ops.layouts import PanelInt4
from batchinfer.ops.native.int4 import can_multiply_int4, native_int4_matmul
from batchinfer.ops.native.library import load_native
from batchinfer.ops.reference import panel_int4_matmul

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def matmul() -> Callable[[Tensor, PanelInt4], Tensor]:
    native = load_native()
    if native.library is None:
        pytest.skip(native.reason)
    if not can_multiply_int4(native.library):
        pytest.skip("this processor does not multiply bf16 itself")
    return native_int4_matmul(native.library)


def layer(out: int, size: int, with_bias: bool = False) -> PanelInt4:
    g = torch.Generator().manual_seed(out + size)
    return pack_int4_panels(torch.randn(out, size, generator=g), torch.randn(out, generator=g) if with_bias else None)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,out,size", [(1, 64, 576), (5, 48, 96), (13, 960, 576), (300, 16, 32), (200, 32, 4096)])
def test_products(
    matmul: Callable[[Tensor, PanelInt4], Tensor], rows: int, out: int, size: int, dtype: torch.dtype, with_bias: bool
) -> None:
    layout, x = layer(out, size, with_bias), torch.randn(rows, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    got, expected = matmul(x, layout), panel_int4_matmul(x, layout)
    assert got.dtype is dtype
    error = (got.float() - expected.float()).norm() / expected.float().norm()
    assert error < (3e-5 if dtype is torch.float32 else 2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_alone_and_in_company(matmul: Callable[[Tensor, PanelInt4], Tensor], dtype: torch.dtype) -> None:
    layout, x = layer(80, 2048), torch.randn(400, 2048, generator=torch.Generator().manual_seed(2)).to(dtype)
    whole = matmul(x, layout)
    for count in (1, 2, 3, 4, 5, 6, 7, 11, 128, 129):
        for start in (0, 17, 400 - count):
            assert torch.equal(matmul(x[start : start + count].clone(), layout), whole[start : start + count]), (count, start)


def test_a_bad_number_spoils_its_row_alone(matmul: Callable[[Tensor, PanelInt4], Tensor]) -> None:
    x = torch.ones(9, 64)
    x[4, 40] = torch.nan
    x[7, 3] = torch.inf
    sound = torch.isfinite(matmul(x, layer(32, 64))).all(1)
    assert sound.tolist() == [True] * 4 + [False] + [True] * 2 + [False] + [True]
