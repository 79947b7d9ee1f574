"""What the machine can do at its best: operations and bytes a second, measured in a moment and remembered."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

from batchinfer.config import cache_root
from batchinfer.errors import BackendError
from batchinfer.machine import largest_cache, read_machine, read_memory, usable_cores

CPU_PRODUCTS = ((256, 1024, 576), (512, 1024, 1024), (512, 1536, 1536))  # rows, outputs, inputs: which is best differs by machine
CUDA_PRODUCTS = (4096, 8192)  # rows, outputs and inputs alike
STREAM_BYTES = {"cpu": 128 * 2**20, "cuda": 1024 * 2**20}  # at least
STREAM_CACHES = 2  # of a CPU, what is streamed is as large as so many of its largest cache: that must not hold it
MOST_OF_MEMORY = 8  # but no more than an eighth of what is free
TIMING_SECONDS = 0.05  # for each timing
MEMORY = "memory"
CALIBRATION_VERSION = 3
MEASUREMENTS = 3  # starts that measure; one alone may fall into a busy moment


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The formats that a run computes in, as its settings name them."""

    dtype: str
    quantization: str = "none"
    kv_dtype: str = ""  # "": the dtype

    @property
    def linear(self) -> str:
        """The format of linear layers' products; 4-bit weights are widened to bf16 first."""
        return {"int8": "int8", "int4": "bf16"}.get(self.quantization, self.dtype)


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Operations a second, of linear layers and of attention, whose format may be another one, and bytes a second."""

    flops: float
    bytes: float
    source: str  # "measured" or "nominal"
    attention_flops: float

    def in_words(self) -> str:
        """For the end report: `430 GFLOP/s, 33 GB/s, measured`."""
        flops, attention = f"{self.flops / 1e9:,.0f}", f"{self.attention_flops / 1e9:,.0f}"
        products = f"{flops} GFLOP/s" if flops == attention else f"{flops} GFLOP/s in linear layers and {attention} in attention"
        return f"{products}, {self.bytes / 1e9:,.0f} GB/s, {self.source}"


@dataclass(frozen=True, slots=True)
class _Known:
    rate: float  # operations or bytes a second
    times: int  # it was measured


def machine_rates(arithmetic: Arithmetic, device: str = "cpu", again: bool = False) -> MachineRates:
    """The machine's rates for a run's products: measured at the first few starts, and remembered.

    The best of all measurements is kept, since other work on the machine can only make it look slower than it is; with
    `again` there is always one more.
    """

    @cache
    def rate(number_format: str) -> float | None:
        try:
            return _best_rate(number_format, device, again)
        except BackendError:  # this processor has no such products
            return None

    own = arithmetic.dtype
    linear = rate(arithmetic.linear) or _best_rate(own, device, again)
    # Beside an 8-bit cache, attention on a CPU multiplies 16-bit integers: half the rate of 8-bit products.
    narrow = rate("int8") if arithmetic.kv_dtype == "int8" and device == "cpu" else None
    attention = narrow / 2 if narrow else rate(own) or linear
    return MachineRates(linear, _best_rate(MEMORY, device, again), "measured", attention)


def _best_rate(what: str, device: str, again: bool) -> float:
    """The best rate known of products in a number format, or of the memory."""
    import torch

    from batchinfer.ops.native.library import load_native

    name = torch.cuda.get_device_name() if device == "cuda" else f"{read_machine().cpu}, {load_native().target}"
    key = f"{CALIBRATION_VERSION}|{name}|{usable_cores()}|{torch.get_num_threads()}|{device}|{what}|{torch.__version__}"
    path = cache_root() / "machine-rates.json"
    known = _read_known(path)
    before = known.get(key, _Known(0.0, 0))
    if before.times >= MEASUREMENTS and not again:
        return before.rate
    measure = _memory_rate if what == MEMORY else partial(_product_rate, what)
    found = _Known(max(measure(device), before.rate), before.times + 1)
    _remember(path, {**known, key: found})
    return found.rate


def _product_rate(number_format: str, device: str) -> float:
    """The best of some products: a limit is what the machine can do at its best."""
    import torch

    from batchinfer.layers.trial import best_seconds

    with torch.inference_mode():
        products = _cuda_products(number_format) if device == "cuda" else _cpu_products(number_format)
        return max(operations / best_seconds(product, TIMING_SECONDS, _wait(device)) for operations, product in products)


def _memory_rate(device: str) -> float:
    """The better of a copy and of a reading."""
    import torch

    from batchinfer.layers.trial import best_seconds

    with torch.inference_mode():
        source = torch.ones(_stream_bytes(device) // 4, device=device)
        target = torch.empty_like(source)
        size, wait = float(source.numel() * 4), _wait(device)
        copied = 2.0 * size / best_seconds(lambda: target.copy_(source), TIMING_SECONDS, wait)  # reads and writes every byte
        return max(copied, size / best_seconds(source.sum, TIMING_SECONDS, wait))


def _stream_bytes(device: str) -> int:
    least = STREAM_BYTES[device]
    return max(least, min(STREAM_CACHES * largest_cache(), read_memory().free // MOST_OF_MEMORY)) if device == "cpu" else least


def _wait(device: str) -> Callable[[], None]:
    import torch

    from batchinfer.layers.trial import done_at_once

    return torch.cuda.synchronize if device == "cuda" else done_at_once


def _cuda_products(number_format: str) -> list[tuple[float, Callable[[], object]]]:
    """Operations, and what does them."""
    import torch

    dtype = {"bf16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[number_format]
    matrices = [torch.randn(size, size, device="cuda").to(dtype) for size in CUDA_PRODUCTS]
    return [(2.0 * len(matrix) ** 3, partial(torch.matmul, matrix, matrix)) for matrix in matrices]


def _cpu_products(number_format: str) -> list[tuple[float, Callable[[], object]]]:
    """The same, of prepacked weights, as linear layers multiply them."""
    import torch

    from batchinfer.layers.kinds import choose_linear
    from batchinfer.layers.trial import trial_product
    from batchinfer.ops.native.library import load_native
    from batchinfer.ops.native.products import products_with

    dtype = torch.bfloat16 if number_format == "bf16" else torch.float32
    library = load_native().library
    kind, _ = choose_linear("int8" if number_format == "int8" else "none", torch.device("cpu"), dtype, library)
    products = products_with(library)
    return [(2.0 * rows * out * size, trial_product(kind, dtype, rows, (out, size), products)) for rows, out, size in CPU_PRODUCTS]


def _read_known(path: Path) -> dict[str, _Known]:
    try:
        return {key: _Known(**value) for key, value in json.loads(path.read_text()).items() if set(value) == set(_Known.__slots__)}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _remember(path: Path, known: dict[str, _Known]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{time.time_ns()}")
        temporary.write_text(json.dumps({key: asdict(found) for key, found in known.items()}, indent=1))
        temporary.replace(path)
    except OSError:
        pass  # a cache folder that cannot be written costs some tenths of a second at each start, nothing else
