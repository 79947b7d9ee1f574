"""A model that does not fit is refused before it is read, with what would fit; what is predicted is what is held."""

from __future__ import annotations

import pytest
import torch

from batchinfer.build import ModelHandle, compute_target, weight_footprint
from batchinfer.config import EngineConfig
from batchinfer.errors import CapacityError
from batchinfer.layers.linear import Linear
from batchinfer.layers.lm_head import LmHead
from batchinfer.machine import Memory
from batchinfer.model.decoder import Decoder
from batchinfer.runtime import pool_size
from tests.engine.engines import build, generate_head, open_tiny
from tests.oracle.tiny_models import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelHandle:
    return open_tiny(write_tiny(tmp_path_factory.mktemp("model") / "tiny", "llama3.2"))


def footprint(model: ModelHandle, quantization: str) -> tuple[int, int]:
    target = compute_target(EngineConfig(model=str(model.files.path), device="cpu", quantization=quantization), model)
    found = weight_footprint(model, target)
    return found.held, found.peak


def test_what_would_fit_is_named(model: ModelHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {name: footprint(model, name)[1] for name in ("int8", "int4")}
    assert max(peaks.values()) < footprint(model, "none")[1]
    for free in (*peaks.values(), min(peaks.values()) - 1):
        monkeypatch.setattr(pool_size, "free_bytes", lambda device, mapped=0, free=free: free)
        with pytest.raises(CapacityError, match="of memory are free") as caught:
            build(model)
        assert [name for name in peaks if f"--quantization {name}" in str(caught.value)] == [name for name in peaks if peaks[name] <= free]
    for name in peaks:
        with pytest.raises(CapacityError, match=f"GiB as {name}"):
            build(model, quantization=name)


def tensors_of(layout: object) -> list[torch.Tensor]:
    return [value for value in (getattr(layout, name) for name in layout.__slots__) if isinstance(value, torch.Tensor)]  # type: ignore[attr-defined]


def held_bytes(decoder: Decoder, head: LmHead) -> int:
    """Bytes of every distinct storage of the linear layers, the head and the table; scales count, zero points of int32 do not."""
    linears: list[Linear] = [getattr(layer, name) for layer in decoder.layers for name in ("qkv", "o", "gate_up", "down")]
    tensors = [t for linear in (*linears, *head._slices) for t in tensors_of(linear.layout) if t.dtype is not torch.int32] + [
        decoder._embed
    ]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_float32_weights_take_what_was_predicted(model: ModelHandle) -> None:
    """Packed layouts are opaque to torch; plain ones, whose head shares the table, can be counted."""
    engine = build(model, dtype="float32")
    assert held_bytes(engine.runner._decoder, generate_head(engine).lm_head) == footprint(model, "none")[0]


def test_a_cgroup_counts_mapped_weights_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_size, "read_memory", lambda: Memory(total=1000, available=800, cgroup_limit=600, cgroup_used=400))
    cpu = torch.device("cpu")
    assert pool_size.free_bytes(cpu) == pool_size.free_bytes(cpu, 300) == 200
    assert pool_size.free_bytes(cpu, 700) == 100
