"""The native tables that this machine can build, each once: what it would choose, and the variants for lesser processors."""

from __future__ import annotations

import pytest

from batchinfer.ops.native import library
from batchinfer.ops.native.library import SWITCH, NativeLibrary, best_variant, load_native
from batchinfer.ops.native.rowwise import native_int8_ops, native_ops
from batchinfer.ops.table import Ops

BEST = best_variant()
VARIANTS = ("on", *(v.name for v in library.VARIANTS[library.VARIANTS.index(BEST) + 1 :])) if BEST else ("on",)


def native_variant(switch: str) -> NativeLibrary:
    """What `BATCHINFER_NATIVE=switch` gives here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, switch)
        return load_native()


def tables(variant: str) -> tuple[Ops, Ops]:
    """(for plain rows, for 8-bit rows); skips, saying why, where the variant cannot be built."""
    native = native_variant(variant)
    if native.library is None:
        pytest.skip(native.reason)
    return native_ops(native.library), native_int8_ops(native.library)
