"""A model that does not fit is refused before it is read, with what would fit; what is predicted is what is held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from batchinfer import machine
from batchinfer.build import ModelHandle, compute_target, weight_footprint
from batchinfer.config import EngineConfig
from batchinfer.errors import CapacityError
from batchinfer.layers.linear import Linear
from batchinfer.layers.lm_head import LmHead
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


@pytest.mark.parametrize("version", [1, 2])
def test_files_that_the_system_keeps_take_no_memory_from_a_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """A checkpoint was read and packed weights were written; else nothing would be left for the pool."""
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}[version]
    for name, number in zip(names, (1000, 900), strict=True):
        (tmp_path / name).write_text(f"{number}\n")
    own = "inactive_file 300\nactive_file 200\n"
    (tmp_path / "memory.stat").write_text(
        own if version == 2 else "inactive_file 1\nactive_file 1\ntotal_inactive_file 300\ntotal_active_file 200\n"
    )
    monkeypatch.setattr(machine, "_cgroup_folders", lambda: [(tmp_path, *names)])
    assert (machine.read_memory().cgroup_limit, machine.read_memory().cgroup_used) == (1000, 400)
    cpu = torch.device("cpu")
    assert pool_size.free_bytes(cpu) == 600
    assert pool_size.free_bytes(cpu, 500) == 100
    (tmp_path / "memory.stat").unlink()
    assert pool_size.free_bytes(cpu) == 100
