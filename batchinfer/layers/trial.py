"""One product of a kind of linear layer, to be timed: which kind is the fastest differs by machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from batchinfer.layers.kinds import LinearKind
from batchinfer.ops.rows import Entry, Product, quantise_rows

Products = Mapping[type, Callable[[Any, Any], Product]]


def trial_product(kind: LinearKind, dtype: torch.dtype, rows: int, shape: tuple[int, int], products: Products) -> Callable[[], object]:
    """The product of rows of `dtype`, as the kind takes them, with a packed weight of `shape` (out, in), out of the table `products`."""
    generator = torch.Generator().manual_seed(0)
    layout = kind.pack(torch.randn(shape, generator=generator).to(kind.weight_dtype), None)
    x = torch.randn(rows, shape[1], generator=generator).to(dtype)
    entry: Entry = quantise_rows(x) if kind.rows == "int8" else x
    matmul = products[type(layout)]
    return lambda: matmul(entry, layout)


def done_at_once() -> None:
    """The wait for a CPU: an operation is done when it returns."""


def best_seconds(work: Callable[[], object], seconds: float, wait: Callable[[], None] = done_at_once) -> float:
    """The best time of runs repeated for `seconds`: other work on the machine only adds. `wait` waits for the device."""
    work()
    wait()
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        work()
        wait()
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return best
