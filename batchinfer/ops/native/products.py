"""The products of linear layers that the native library computes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from batchinfer.ops import reference
from batchinfer.ops.layouts import Int8Channel, PanelInt4
from batchinfer.ops.native.int4 import can_multiply_int4, native_int4_matmul
from batchinfer.ops.native.linear_amx import can_multiply_tiles, tile_products
from batchinfer.ops.rows import Entry, Product, QuantRows, ScaledRows, quantise_rows
from batchinfer.ops.table import MATMUL


def products_with(
    library: ctypes.CDLL | None, enter: Callable[[Tensor], QuantRows] = quantise_rows
) -> Mapping[type, Callable[[Any, Any], Product]]:
    """The product of every layout, by the library where it has one for this processor. `enter` puts plain rows into 8 bits."""

    def int8_matmul(x: Entry, layout: Int8Channel) -> ScaledRows:
        return reference.int8_matmul(enter(x) if isinstance(x, Tensor) else x, layout)

    products: dict[type, Callable[[Any, Any], Product]] = {**MATMUL, Int8Channel: int8_matmul}
    if library is not None and can_multiply_int4(library):
        products[PanelInt4] = native_int4_matmul(library)
    if library is not None and can_multiply_tiles(library):
        products.update(tile_products(library, enter))
    return products
