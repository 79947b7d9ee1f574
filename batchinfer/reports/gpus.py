"""GPUs by name: memory, bandwidth and rates from the vendor's data sheets, and what a step would cost on one of them.

A data sheet gives what the chip could do at most; an engine reaches a share of that, and the shares used here are
stated. For a GPU at hand, `bench` measures instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.core.step_cost import StepCost
from batchinfer.errors import ConfigError
from batchinfer.model.footprint import Footprint, Sizes, layer_shapes

GB, TERA = 10**9, 10**12
OPERATIONS_SHARE = 0.65  # of the nominal products a second: large products reach 75 to 80 %, those between them less
BYTES_SHARE = 0.75  # of the nominal bandwidth: a copy reaches 85 to 90 %, paged reading less
GRAPH_KERNEL, EAGER_KERNEL = 1.25e-6, 6e-6  # seconds between two kernels of a step: within a CUDA graph, and launched one by one
LAYER_KERNELS, OTHER_KERNELS = 8, 6
HOST_SECONDS = 3e-4  # of a step: scheduling, and the transfer of the tokens
MEMORY_SHARE = 0.9  # of the memory that an engine uses, for weights and KV
LOGIT_BYTES = 4
SCORE_BYTES = 16  # a score in float32, written and read twice, where attention is not fused


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: bytes, bytes a second, and dense operations a second (half of what data sheets give with sparsity)."""

    title: str
    memory: float
    bandwidth: float
    bf16: float
    int8: float
    fp8: float | None  # None: the chip has no such products
    source: str


_H = "https://www.nvidia.com/en-us/data-center"
GPUS = {
    "b200": Gpu("NVIDIA B200", 180 * GB, 7.7 * TERA, 2250 * TERA, 4500 * TERA, 4500 * TERA, f"HGX B200 data sheet, {_H}/hgx/"),
    "h200": Gpu("NVIDIA H200 SXM", 141 * GB, 4.8 * TERA, 989 * TERA, 1979 * TERA, 1979 * TERA, f"H200 data sheet, {_H}/h200/"),
    "h100": Gpu("NVIDIA H100 SXM", 80 * GB, 3.35 * TERA, 989 * TERA, 1979 * TERA, 1979 * TERA, f"H100 data sheet, {_H}/h100/"),
    "a100": Gpu("NVIDIA A100 SXM 80 GB", 80 * GB, 2.039 * TERA, 312 * TERA, 624 * TERA, None, f"A100 data sheet, {_H}/a100/"),
    "l40s": Gpu("NVIDIA L40S", 48 * GB, 0.864 * TERA, 362 * TERA, 733 * TERA, 733 * TERA, f"L40S data sheet, {_H}/l40s/"),
    "l4": Gpu("NVIDIA L4", 24 * GB, 0.3 * TERA, 121 * TERA, 242 * TERA, 242 * TERA, f"L4 data sheet, {_H}/l4/"),
    "4090": Gpu(
        "GeForce RTX 4090",
        24 * GB,
        1.008 * TERA,
        165.2 * TERA,
        660.6 * TERA,
        330.3 * TERA,
        "Ada GPU architecture white paper (sums in float32), https://www.nvidia.com/en-us/geforce/ada-lovelace-architecture/",
    ),
}


def gpu_named(name: str) -> Gpu:
    """The GPU of this name, `rtx` and the vendor before it or not. Raises `ConfigError` for one that is not in the table."""
    key = name.lower().replace(" ", "").replace("-", "")
    for prefix in ("nvidia", "geforce", "rtx"):
        key = key.removeprefix(prefix)
    if key not in GPUS:
        raise ConfigError(f"--gpu {name}: not in the table; known: {', '.join(GPUS)}")
    return GPUS[key]


@dataclass(frozen=True, slots=True)
class GpuRun:
    """How a model would run on a GPU: the formats, and the features that change what a step costs."""

    quantization: str  # of weights
    kv_bytes_per_token: int
    flash_attention: bool = True
    graphs: bool = True


def gpu_step_cost(gpu: Gpu, model: Sizes, run: GpuRun) -> StepCost:
    """A step's cost from the data sheet: the larger of reading and multiplying for the layers and for the head, then attention.

    8-bit weights multiply at the 8-bit rate, 4-bit ones are widened to bf16 first.
    """
    weights = Footprint.of(model, run.quantization, 2, 2)
    parameters = model.num_layers * sum(out * size for out, size in layer_shapes(model))
    rate = (gpu.int8 if run.quantization == "int8" else gpu.bf16) * OPERATIONS_SHARE
    bandwidth, plain_rate = gpu.bandwidth * BYTES_SHARE, gpu.bf16 * OPERATIONS_SHARE
    pair = 4.0 * model.num_heads * model.head_dim * model.num_layers / plain_rate
    scores = 0.0 if run.flash_attention else model.num_heads * model.num_layers * SCORE_BYTES / bandwidth
    kernel = GRAPH_KERNEL if run.graphs else EAGER_KERNEL
    a_row = 2.0 * model.vocab_size * model.hidden_size / rate
    logits = LOGIT_BYTES * model.vocab_size / bandwidth
    return StepCost(
        layers=_roof(weights.layers / bandwidth, 2.0 * parameters / rate),
        head=tuple((count, seconds + count * logits) for count, seconds in _roof(weights.head / bandwidth, a_row)),
        decode_read=max(run.kv_bytes_per_token / bandwidth, pair) + scores,
        prefill_pair=pair + scores,
        constant=(LAYER_KERNELS * model.num_layers + OTHER_KERNELS) * kernel + HOST_SECONDS,
        source=f"{gpu.title} at {OPERATIONS_SHARE:.0%} of its data sheet's operations and {BYTES_SHARE:.0%} of its bandwidth",
    )


def _roof(reading: float, each: float) -> tuple[tuple[float, float], ...]:
    """Seconds of `count` rows through weights that take `reading` to read, at `each` a row: flat, then rising."""
    knee = reading / each
    if knee <= 1.0:
        return ((1.0, each), (2.0, 2.0 * each))
    return ((1.0, reading), (knee, reading), (2.0 * knee, 2.0 * reading))
