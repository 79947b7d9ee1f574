"""Which device and number format to compute in, chosen once at start and said aloud."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from batchinfer.attention.base import AttentionBackend
from batchinfer.attention.kv_cache import KVCache
from batchinfer.attention.native import NativeAttention, why_not_native
from batchinfer.attention.reference import ReferenceAttention
from batchinfer.errors import BackendError
from batchinfer.layers.kinds import LinearKind, choose_linear
from batchinfer.machine import read_machine
from batchinfer.ops.native.library import NativeLibrary, load_native
from batchinfer.ops.native.products import products_with
from batchinfer.ops.native.rowwise import native_int8_ops, native_ops
from batchinfer.ops.table import REFERENCE, REFERENCE_INT8, Choice, Ops
from batchinfer.stopwatch import NO_STOPWATCH, Stopwatch

TORCH_DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
BF16_FEATURES = ("avx512_bf16", "amx_bf16", "bf16")  # processors that multiply bf16 themselves


ONLY_ONE = "plain torch; the only one for this device in this version"
QUANTIZATION_REASONS = {
    "int8": "asked for; weights in 8 bits with a scale per output, what they multiply in 8 bits with a scale per token",
    "int4": "asked for; weights in 4 bits, each 32 inputs of an output with a scale and an offset; the head in 8",
}


@dataclass(frozen=True, slots=True)
class ComputeTarget:
    """Device, dtype and the functions that go with them; `choices` says why."""

    device: torch.device
    dtype_name: str
    linear: LinearKind
    ops: Ops
    native: NativeLibrary
    flash: NativeLibrary  # the same where attention takes part in it, else why not
    fused: NativeLibrary  # the same where the operations between the products and the sampler do
    choices: tuple[Choice, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The run's dtype for activations, and for weights that are not quantised."""
        return TORCH_DTYPES[self.dtype_name]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The settings that decide the target, as they were given."""

    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "none"
    flash_attention: bool = True
    graphs: bool = True  # on a CPU: fused native operations


def choose_target(wanted: Wanted, checkpoint_dtype: str, quantised: bool, watch: Stopwatch = NO_STOPWATCH) -> ComputeTarget:
    """Resolve `auto`. `checkpoint_dtype` is the model's own; `quantised` weights have no exact dtype of their own.

    Raises `BackendError` for what cannot run here.
    """
    place, place_reason = _device(wanted.device)
    name, dtype_reason = _dtype(wanted.dtype, checkpoint_dtype, quantised, place)
    choices = [Choice("device", place.type, place_reason), Choice("dtype", name, dtype_reason)]
    with watch.stage("native library"):
        native = load_native() if place.type == "cpu" else NativeLibrary(None, ONLY_ONE)
    watch.say("native library", "none" if native.library is None else "built" if native.is_new else "loaded")
    flash = native if wanted.flash_attention else _without(native, "--no-flash-attention")
    fused = native if wanted.graphs else _without(native, "--enforce-eager")
    linear, matmul = choose_linear(wanted.quantization, place, TORCH_DTYPES[name], native.library)
    if linear.name in QUANTIZATION_REASONS:
        choices.append(Choice("quantization", linear.name, QUANTIZATION_REASONS[linear.name]))
    ops, replaced = _ops(linear, native, fused)
    return ComputeTarget(place, name, linear, ops, native, flash, fused, (*choices, matmul, *replaced))


def _without(native: NativeLibrary, flag: str) -> NativeLibrary:
    """What a part sees of the library when a flag keeps it from it."""
    return native if native.library is None else NativeLibrary(None, f"switched off by {flag}")


def _ops(linear: LinearKind, native: NativeLibrary, fused: NativeLibrary) -> tuple[Ops, list[Choice]]:
    """The table of operations for the rows between these linear layers, and why."""
    rowwise = ("rms_norm", "silu_and_mul", *(("quantise",) if linear.rows == "int8" else ()))
    if fused.library is None:
        return _unfused(linear, native), [Choice(name, "reference", fused.reason) for name in rowwise]
    ops = native_int8_ops(fused.library) if linear.rows == "int8" else native_ops(fused.library)
    return ops, [Choice(name, "native", fused.reason) for name in rowwise]


def _unfused(linear: LinearKind, native: NativeLibrary) -> Ops:
    """The reference operations around the linear layers' own products, which no switch replaces."""
    table = REFERENCE_INT8 if linear.rows == "int8" else REFERENCE
    return replace(table, matmul=products_with(native.library))


def choose_attention(kv: KVCache, target: ComputeTarget) -> tuple[AttentionBackend, Choice]:
    """The native kernel on a CPU that can build and run it for these shapes, else the reference; says why."""
    reference = ReferenceAttention(kv, target.device, target.dtype)
    if target.device.type != "cpu":
        return reference, Choice("attention", "reference", ONLY_ONE)
    if target.flash is not target.native:
        return reference, Choice("attention", "reference", target.flash.reason)
    library, reason = target.native.library, why_not_native(kv.spec, kv.block_size)
    if library is None or reason is not None:
        return reference, Choice("attention", "reference, slower", reason or target.native.reason)
    return NativeAttention(kv, library, target.dtype), Choice("attention", "native", target.native.reason)


def _device(wanted: str) -> tuple[torch.device, str]:
    if wanted == "cpu":
        return torch.device("cpu"), "asked for"
    usable = torch.cuda.is_available()
    if wanted == "cuda":
        if not usable:
            raise BackendError(f"--device cuda: this torch ({torch.__version__}) sees no usable GPU; run `batchinfer doctor`")
        return torch.device("cuda"), "asked for"
    if usable:
        return torch.device("cuda"), torch.cuda.get_device_name()
    return torch.device("cpu"), "torch sees no usable GPU"


def _dtype(wanted: str, own: str, quantised: bool, device: torch.device) -> tuple[str, str]:
    if wanted != "auto":
        return wanted, "asked for"
    if own == "float32" and not quantised:
        return "float32", "the checkpoint's own"
    source = "quantised weights, computed in" if quantised else f"the checkpoint's own is {own};"
    if device.type == "cuda":
        return "bf16", f"{source} bf16"
    features = read_machine().cpu_features
    native = [name for name in BF16_FEATURES if name in features]
    if native and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "bf16", f"{source} bf16, which this processor multiplies natively ({native[0]})"
    return "float32", f"{source} float32, because this processor does not multiply bf16 natively"
