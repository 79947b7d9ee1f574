"""The native tables that this machine can build, each once: what it would choose, and the variant for AVX2."""

from __future__ import annotations

import pytest

from batchinfer.ops.native.library import SWITCH, load_native
from batchinfer.ops.native.rowwise import native_int8_ops, native_ops
from batchinfer.ops.table import Ops

VARIANTS = ("on", "avx2")


def tables(variant: str) -> tuple[Ops, Ops]:
    """(for plain rows, for 8-bit rows); skips, saying why, where the variant cannot be built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, variant)
        native = load_native()
    if native.library is None:
        pytest.skip(native.reason)
    return native_ops(native.library), native_int8_ops(native.library)
