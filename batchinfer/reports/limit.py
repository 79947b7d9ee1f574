"""The physical limit of a run: what its steps had to compute and read, against what the machine can do.

The formula needs only what the scheduler knows about a step (`StepShape`), the model's sizes and two rates of the
machine. It counts each weight once a step and each token's KV once a read, so it is a bound on time, not a forecast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchinfer.model.footprint import Footprint, Sizes, layer_shapes
from batchinfer.reports.rates import Arithmetic, MachineRates

if TYPE_CHECKING:
    from batchinfer.core.stats import StepShape

ITEM_BYTES = {"bf16": 2, "float16": 2, "float32": 4}  # of a number in a run's dtype
LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class ModelDims:
    """Parameters and bytes of a model in the arithmetic of a run."""

    layer_parameters: int  # of linear layers, head not counted
    head_parameters: int
    layer_bytes: int  # of their weights, scales included
    head_bytes: int
    kv_bytes: int  # a token, all layers
    attention_flops: int  # a query token times a context token, all layers: two products of 2 * heads * head_dim
    vocab_size: int

    @classmethod
    def of(cls, model: Sizes, arithmetic: Arithmetic, kv_bytes_per_token: int) -> ModelDims:
        """The dimensions of a model in this arithmetic."""
        item_bytes = ITEM_BYTES[arithmetic.dtype]
        weights = Footprint.of(model, arithmetic.quantization, item_bytes, item_bytes)
        return cls(
            layer_parameters=model.num_layers * sum(out * size for out, size in layer_shapes(model)),
            head_parameters=model.vocab_size * model.hidden_size,
            layer_bytes=weights.layers,
            head_bytes=weights.head,
            kv_bytes=kv_bytes_per_token,
            attention_flops=4 * model.num_heads * model.head_dim * model.num_layers,
            vocab_size=model.vocab_size,
        )


@dataclass(slots=True)
class LimitMeter:
    """Adds up the least time, the operations and the bytes of a run's steps. Call it with every `StepShape`."""

    dims: ModelDims
    rates: MachineRates
    steps: int = 0
    least_seconds: float = 0.0
    busy_seconds: float = 0.0  # of the arithmetic units, were they never to wait
    bytes: float = 0.0

    def __call__(self, shape: StepShape) -> None:
        """Count one step."""
        dims, rates = self.dims, self.rates
        linear = 2.0 * dims.layer_parameters * (shape.num_decode + shape.num_prefill) + 2.0 * dims.head_parameters * shape.num_logits
        weights = float(dims.layer_bytes + (dims.head_bytes if shape.num_logits else 0))
        kv_read = float(dims.kv_bytes) * shape.decode_context
        decode = float(dims.attention_flops) * shape.decode_context
        prefill = float(dims.attention_flops) * shape.prefill_attention
        logits = float(LOGIT_BYTES * dims.vocab_size * shape.num_logits)
        self.steps += 1
        self.busy_seconds += linear / rates.flops + (decode + prefill) / rates.attention_flops
        self.bytes += weights + kv_read + logits
        self.least_seconds += (
            max(weights / rates.bytes, linear / rates.flops)
            + max(kv_read / rates.bytes, decode / rates.attention_flops)
            + prefill / rates.attention_flops
            + logits / rates.bytes
        )

    def against(self, seconds: float) -> LimitReport:
        """What share of the limit a run of `seconds` reached."""
        if seconds <= 0 or not self.steps:
            return LimitReport(0.0, 0.0, 0.0, self.rates)
        return LimitReport(
            fraction=self.least_seconds / seconds,
            mfu=self.busy_seconds / seconds,
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
            "attention_flops_per_s": round(self.rates.attention_flops),
            "bytes_per_s": round(self.rates.bytes),
            "rates": self.rates.source,
        }


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
