"""The physical limit of a run: what its steps had to compute and read, against what the machine can do.

The formula needs only what the scheduler knows about a step (`StepShape`), the model's sizes and two rates of the
machine. It counts each weight once a step and each token's KV once a read, so it is a bound on time, not a forecast.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from batchinfer.config import cache_root
from batchinfer.machine import read_machine, usable_cores

if TYPE_CHECKING:
    import torch

    from batchinfer.core.stats import StepShape

BYTES = {"bf16": 2, "float16": 2, "float32": 4}
LOGIT_BYTES = 4
PRODUCT_SIZES = {"cpu": (512, 1024), "cuda": (4096, 8192)}  # rows, columns and depth of the calibrating products
STREAM_BYTES = {"cpu": 128 * 2**20, "cuda": 1024 * 2**20}
CALIBRATION_SECONDS = 0.075  # for each of four timings
CALIBRATION_VERSION = 1
MEASUREMENTS = 3  # starts that measure; one alone may fall into a busy moment


class Sizes(Protocol):
    """The sizes of a model that the formula needs (`model.config.ModelConfig` has them)."""

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def intermediate_size(self) -> int: ...  # noqa: D102
    @property
    def num_layers(self) -> int: ...  # noqa: D102
    @property
    def num_heads(self) -> int: ...  # noqa: D102
    @property
    def num_kv_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class ModelDims:
    """Parameters and bytes of a model in the arithmetic of a run."""

    layer_parameters: int  # of linear layers, head not counted
    head_parameters: int
    weight_bytes: int  # a parameter
    kv_bytes: int  # a token, all layers
    attention_flops: int  # a query token times a context token, all layers: two products of 2 * heads * head_dim
    vocab_size: int

    @classmethod
    def of(cls, model: Sizes, dtype: str, kv_bytes_per_token: int) -> ModelDims:
        """The dimensions of a model run in `dtype`."""
        queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        attention = model.hidden_size * (queries + 2 * keys) + queries * model.hidden_size
        return cls(
            layer_parameters=model.num_layers * (attention + 3 * model.hidden_size * model.intermediate_size),
            head_parameters=model.vocab_size * model.hidden_size,
            weight_bytes=BYTES[dtype],
            kv_bytes=kv_bytes_per_token,
            attention_flops=4 * queries * model.num_layers,
            vocab_size=model.vocab_size,
        )


@dataclass(frozen=True, slots=True)
class MachineRates:
    """What the machine can do: floating-point operations and bytes a second."""

    flops: float
    bytes: float
    source: str  # "measured" or "nominal"


@dataclass(slots=True)
class LimitMeter:
    """Adds up the least time, the operations and the bytes of a run's steps. Call it with every `StepShape`."""

    dims: ModelDims
    rates: MachineRates
    steps: int = 0
    least_seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    def __call__(self, shape: StepShape) -> None:
        """Count one step."""
        dims, rates = self.dims, self.rates
        linear = 2.0 * dims.layer_parameters * (shape.num_decode + shape.num_prefill) + 2.0 * dims.head_parameters * shape.num_logits
        head = dims.head_parameters if shape.num_logits else 0
        weights = float(dims.weight_bytes * (dims.layer_parameters + head))
        kv_read = float(dims.kv_bytes) * shape.decode_context
        decode = float(dims.attention_flops) * shape.decode_context
        prefill = float(dims.attention_flops) * shape.prefill_attention
        logits = float(LOGIT_BYTES * dims.vocab_size * shape.num_logits)
        self.steps += 1
        self.flops += linear + decode + prefill
        self.bytes += weights + kv_read + logits
        self.least_seconds += (
            max(weights / rates.bytes, linear / rates.flops)
            + max(kv_read / rates.bytes, decode / rates.flops)
            + prefill / rates.flops
            + logits / rates.bytes
        )

    def against(self, seconds: float) -> LimitReport:
        """What share of the limit a run of `seconds` reached."""
        if seconds <= 0 or not self.steps:
            return LimitReport(0.0, 0.0, 0.0, self.rates)
        return LimitReport(
            fraction=self.least_seconds / seconds,
            mfu=self.flops / (self.rates.flops * seconds),
            mbu=self.bytes / (self.rates.bytes * seconds),
            rates=self.rates,
        )


@dataclass(frozen=True, slots=True)
class LimitReport:
    """Shares of the limit: of the bound on time, of the operations (MFU) and of the bytes (MBU) that were possible."""

    fraction: float
    mfu: float
    mbu: float
    rates: MachineRates

    def as_dict(self) -> dict[str, Any]:
        """For a JSON report."""
        return {
            "fraction": round(self.fraction, 4),
            "mfu": round(self.mfu, 4),
            "mbu": round(self.mbu, 4),
            "flops_per_s": round(self.rates.flops),
            "bytes_per_s": round(self.rates.bytes),
            "rates": self.rates.source,
        }


def machine_rates(dtype: str, device: str = "cpu", again: bool = False) -> MachineRates:
    """The machine's rates for products in `dtype`: measured in 0.3 s at the first few starts, and remembered.

    The best of all measurements is kept, since other work on the machine can only make it look slower than it is; with
    `again` there is always one more.
    """
    import torch

    machine = read_machine()
    name = torch.cuda.get_device_name() if device == "cuda" else machine.cpu
    threads = torch.get_num_threads()
    key = f"{CALIBRATION_VERSION}|{name}|{usable_cores()}|{threads}|{device}|{dtype}|{torch.__version__}"
    path = cache_root() / "machine-rates.json"
    known = _read_known(path)
    entry = dict(known.get(key, {}))
    times = int(entry.pop("times", 0))
    before = MachineRates(**entry) if entry else None
    if before is not None and not again and times >= MEASUREMENTS:
        return before
    rates = _measure(dtype, device)
    if before is not None:
        rates = MachineRates(max(rates.flops, before.flops), max(rates.bytes, before.bytes), "measured")
    _remember(path, {**known, key: {**asdict(rates), "times": times + 1}})
    return rates


def gap_reasons(meter: LimitMeter, seconds: dict[str, float], recomputed: int, computed: int) -> list[str]:
    """Plain sentences on what lies between a run and its limit, the largest share of the run's time first."""
    run = max(seconds["run"], 1e-9)
    forward, sample, host = seconds["prefill"] + seconds["decode"], seconds["sample"], seconds["host"]
    shares = [
        (forward - meter.least_seconds, "model steps slower than the limit (small operations, padding, memory stalls)"),
        (sample, "sampling"),
        (host, "scheduling and bookkeeping"),
        (run - forward - sample - host, "reading, tokenising and writing between steps"),
    ]
    reasons = [f"{time_lost / run:.0%} {what}" for time_lost, what in sorted(shares, reverse=True) if time_lost / run >= 0.01]
    if recomputed and computed:
        reasons.append(f"{recomputed / computed:.1%} of the tokens were computed again after preemptions")
    return reasons


def _measure(dtype: str, device: str) -> MachineRates:
    """The best rate of two products and of a copy and a reading: a limit is what the machine can do at its best."""
    import torch

    torch_dtype = {"bf16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[dtype]
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else _no_wait
    with torch.inference_mode():
        flops = max(_product_rate(torch.randn(size, size, device=device).to(torch_dtype), wait) for size in PRODUCT_SIZES[device])
        source = torch.ones(STREAM_BYTES[device] // 4, device=device)
        target = torch.empty_like(source)
        size = float(source.numel() * 4)
        copied = 2.0 * size / _best_seconds(lambda: target.copy_(source), wait)  # a copy reads and writes every byte
        read = size / _best_seconds(source.sum, wait)
    return MachineRates(flops, max(copied, read), "measured")


def _product_rate(matrix: torch.Tensor, wait: Callable[[], None]) -> float:
    return 2.0 * matrix.shape[0] ** 3 / _best_seconds(lambda: matrix @ matrix, wait)


def _best_seconds(work: Callable[[], object], wait: Callable[[], None]) -> float:
    """The best time of repeated runs within the calibration's share of time: other work on the machine only adds."""
    work()
    wait()
    best, end = float("inf"), time.perf_counter() + CALIBRATION_SECONDS
    while True:
        start = time.perf_counter()
        work()
        wait()
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return best


def _no_wait() -> None:
    """A CPU operation is done when it returns."""


def _read_known(path: Any) -> dict[str, dict[str, Any]]:
    try:
        known = json.loads(path.read_text())
        return {key: value for key, value in known.items() if set(value) == {"flops", "bytes", "source", "times"}}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _remember(path: Any, known: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{time.time_ns()}")
        temporary.write_text(json.dumps(known, indent=1))
        temporary.replace(path)
    except OSError:
        pass  # a cache folder that cannot be written costs 0.3 s at each start, nothing else
