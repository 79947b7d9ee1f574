"""Many engines over one model in a test: the weights are packed once for each arithmetic, everything else is built anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from batchinfer import build


@contextmanager
def kept_weights() -> Iterator[None]:
    """Within it, engines of one model, arithmetic and native library share what was loaded: nothing writes to weights."""
    load, kept = build.load_weights, {}

    def load_once(model: Any, target: Any, watch: Any = None) -> Any:
        key = (model.files.path, model.max_model_len, target.dtype_name, target.linear.name, target.native.target, target.fused.reason)
        if key not in kept:
            kept[key] = load(model, target)
        return kept[key]

    build.load_weights = load_once
    try:
        yield
    finally:
        build.load_weights = load
