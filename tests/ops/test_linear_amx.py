"""The native products of tiles against their references, their independence of neighbours, and what they may not touch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from batchinfer.layers.linear import pack_int8
from batchinfer.layers.linear_check import int8_product_saturates
from batchinfer.layers.row_sizes import cancelling
from batchinfer.layers.tiles import outputs_of, pack_tile_bf16, pack_tile_int8
from batchinfer.ops.layouts import TileBf16, TileInt8
from batchinfer.ops.native.library import load_native
from batchinfer.ops.native.linear_amx import can_multiply_tiles, tile_products
from batchinfer.ops.reference import int8_matmul, tile_bf16_matmul, tile_int8_matmul, tile_weight
from batchinfer.ops.rows import QuantRows, quantise_rows

SHAPES = [(960, 576), (576, 1536), (40, 48), (16, 32), (100, 96), (1, 1), (33, 65), (300, 4096)]  # (out, in)
ROWS = [1, 2, 15, 16, 17, 31, 32, 33, 70]
Products = Mapping[type, Callable[[Any, Any], Any]]


@pytest.fixture(scope="module")
def products() -> Products:
    native = load_native()
    if native.library is None:
        pytest.skip(native.reason)
    if not can_multiply_tiles(native.library):
        pytest.skip("this processor has no matrix registers")
    return tile_products(native.library, quantise_rows)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def codes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_hold_the_weight_and_zeros(shape: tuple[int, int]) -> None:
    out, size = shape
    weight = random(out, size).bfloat16()
    whole = tile_weight(pack_tile_bf16(weight, None).tiles)
    assert torch.equal(whole[:out, :size], weight)
    assert whole.shape[0] % 32 == 0
    assert whole.shape[1] % 32 == 0
    assert whole.count_nonzero() == weight.count_nonzero()


def test_outputs_are_found_in_the_tiles() -> None:
    weight = random(100, 70).bfloat16()
    ids = torch.tensor([0, 15, 16, 31, 32, 99, 32])
    assert torch.equal(outputs_of(pack_tile_bf16(weight, None), ids), weight[ids])


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_products(products: Products, shape: tuple[int, int], with_bias: bool) -> None:
    out, size = shape
    layout = pack_tile_bf16(random(out, size).bfloat16(), random(out, seed=2).bfloat16() if with_bias else None)
    for rows in ROWS:
        x = random(rows, size, seed=rows).bfloat16()
        got, expected = products[TileBf16](x, layout), tile_bf16_matmul(x, layout)
        assert got.dtype is torch.bfloat16
        assert (got.float() - expected.float()).norm() <= 2e-3 * expected.float().norm()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_products_are_exact(products: Products, shape: tuple[int, int], with_bias: bool) -> None:
    out, size = shape
    layout = pack_tile_int8(random(out, size), random(out, seed=2) if with_bias else None)
    for rows in ROWS:
        x = QuantRows(codes(rows, size), torch.rand(rows))
        got, expected = products[TileInt8](x, layout), tile_int8_matmul(x, layout)
        assert torch.equal(got.values, expected.values)
        assert got.scale is x.scale
        assert got.bias is layout.bias


def test_int8_products_have_the_bits_of_onednn(products: Products) -> None:
    if int8_product_saturates(pack_int8):
        pytest.skip("oneDNN's product saturates here")
    weight, x = random(96, 1536), QuantRows(codes(50, 1536), torch.rand(50))
    assert torch.equal(products[TileInt8](x, pack_tile_int8(weight, None)).values, int8_matmul(x, pack_int8(weight, None)).values)


def test_the_largest_codes_do_not_saturate(products: Products) -> None:
    layout = pack_tile_int8(torch.ones(32, 16384), None)  # rotated: one large entry in a block
    layout = TileInt8(
        torch.full_like(layout.tiles, -127), layout.scale, torch.full((32,), -127 * 16384 * 128, dtype=torch.int32), 16384, None
    )
    x = QuantRows(torch.full((3, 16384), 255, dtype=torch.uint8), torch.ones(3))
    assert torch.equal(products[TileInt8](x, layout).values, (torch.tensor(-127.0 * 127 * 16384) * layout.scale).expand(3, -1))


@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (48, 4096)])
def test_a_bf16_row_is_the_same_alone_and_in_company(products: Products, shape: tuple[int, int]) -> None:
    """Products that cancel to what rounding left: any other order of sums would show."""
    weight, x = (part.bfloat16() for part in cancelling(shape, 1100))
    layout = pack_tile_bf16(weight, None)
    whole = products[TileBf16](x, layout)
    assert whole.count_nonzero() > 0
    for count in (*ROWS, 256, 513):
        for start in (0, 17, 1100 - count):
            assert torch.equal(products[TileBf16](x[start : start + count].clone(), layout), whole[start : start + count]), (count, start)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_threads_change_nothing(products: Products, threads: int) -> None:
    layout, x = pack_tile_bf16(random(960, 576).bfloat16(), None), random(700, 576, seed=1).bfloat16()
    expected, before = products[TileBf16](x, layout), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(products[TileBf16](x, layout), expected)
    finally:
        torch.set_num_threads(before)


def test_a_bad_number_spoils_its_row_alone(products: Products) -> None:
    x = torch.ones(40, 70).bfloat16()
    x[4, 69] = torch.nan
    x[33, 3] = torch.inf
    sound = torch.isfinite(products[TileBf16](x, pack_tile_bf16(random(35, 70).bfloat16(), None))).all(1)
    assert (~sound).nonzero().flatten().tolist() == [4, 33]


def test_rows_that_do_not_lie_side_by_side(products: Products) -> None:
    layout, x = pack_tile_bf16(random(64, 96).bfloat16(), None), random(50, 192).bfloat16()
    assert torch.equal(products[TileBf16](x[:, :96], layout), products[TileBf16](x[:, :96].clone(), layout))
    assert torch.equal(products[TileBf16](x[::2, :96], layout), products[TileBf16](x[:, :96].clone(), layout)[::2])


def test_no_rows(products: Products) -> None:
    assert products[TileBf16](torch.empty(0, 96, dtype=torch.bfloat16), pack_tile_bf16(random(64, 96).bfloat16(), None)).shape == (0, 64)
