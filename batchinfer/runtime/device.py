"""Which device and number format to compute in, chosen once at start and said aloud."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchinfer.attention.base import AttentionBackend
from batchinfer.attention.kv_cache import KVCache
from batchinfer.attention.native import NativeAttention, why_not_native
from batchinfer.attention.reference import ReferenceAttention
from batchinfer.errors import BackendError
from batchinfer.layers.linear import Pack, pack_dense, pack_onednn_bf16
from batchinfer.machine import read_machine
from batchinfer.ops.cpu import CPU
from batchinfer.ops.native.library import load_native
from batchinfer.ops.native.rowwise import native_ops
from batchinfer.ops.table import REFERENCE, Choice, Ops

TORCH_DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
BF16_FEATURES = ("avx512_bf16", "amx_bf16", "bf16")  # processors that multiply bf16 themselves


@dataclass(frozen=True, slots=True)
class ComputeTarget:
    """Device, dtype and the functions that go with them; `choices` says why."""

    device: torch.device
    dtype_name: str
    pack: Pack
    ops: Ops
    choices: tuple[Choice, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The run's dtype for weights and activations."""
        return TORCH_DTYPES[self.dtype_name]


def choose_target(device: str, dtype: str, checkpoint_dtype: str, quantised: bool) -> ComputeTarget:
    """Resolve `auto`. `checkpoint_dtype` is the model's own; `quantised` weights have no exact dtype of their own."""
    place, place_reason = _device(device)
    name, dtype_reason = _dtype(dtype, checkpoint_dtype, quantised, place)
    choices = [Choice("device", place.type, place_reason), Choice("dtype", name, dtype_reason)]
    pack, matmul = _pack(place, name)
    choices.append(matmul)
    ops, replaced = _ops(place)
    return ComputeTarget(place, name, pack, ops, (*choices, *replaced))


def _ops(device: torch.device) -> tuple[Ops, list[Choice]]:
    """The device's table of operations, and why."""
    rowwise = ("rms_norm", "silu_and_mul", "rotary")
    if device.type != "cpu":
        return REFERENCE, [
            Choice(name, "reference", "plain torch; the only one for this device in this version") for name in (*rowwise, "argmax")
        ]
    argmax = Choice("argmax", "numpy", "vectorised")
    native = load_native()
    if native.library is None:
        return CPU, [*(Choice(name, "reference", native.reason) for name in rowwise), argmax]
    return native_ops(native.library), [*(Choice(name, "native", native.reason) for name in rowwise), argmax]


def choose_attention(kv: KVCache, device: torch.device) -> tuple[AttentionBackend, Choice]:
    """The native kernel on a CPU that can build and run it for these shapes, else the reference; says why."""
    if device.type != "cpu":
        return ReferenceAttention(kv, device), Choice("attention", "reference", "plain torch; the only one for this device in this version")
    reason = why_not_native(kv.spec, kv.block_size)
    if reason is None:
        native = load_native()
        if native.library is not None:
            return NativeAttention(kv, native.library), Choice("attention", "native", native.reason)
        reason = native.reason
    return ReferenceAttention(kv, device), Choice("attention", "reference, slower", reason)


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


def _pack(device: torch.device, dtype: str) -> tuple[Pack, Choice]:
    if device.type == "cpu" and dtype == "bf16":
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return pack_onednn_bf16, Choice("matmul", "oneDNN, prepacked bf16", "float32 accumulation")
        raise BackendError("--dtype bf16: this processor cannot multiply bf16 through oneDNN; use --dtype float32")
    return pack_dense, Choice("matmul", f"torch, {dtype}", "the device's own library")
