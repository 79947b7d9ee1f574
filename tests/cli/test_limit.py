"""The physical limit: sizes of known models, the formula, and the calibration's cache."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from batchinfer.core.stats import StepShape
from batchinfer.reports.limit import LimitMeter, MachineRates, ModelDims, gap_reasons, machine_rates


@dataclass(frozen=True)
class Sizes:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def kv_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 2


SMOLLM2 = Sizes(49152, 576, 1536, 30, 9, 3, 64)
LLAMA_1B = Sizes(128256, 2048, 8192, 16, 32, 8, 64)
LLAMA_8B = Sizes(128256, 4096, 14336, 32, 32, 8, 128)


@pytest.mark.parametrize(
    "sizes, layers, head, attention, kv",
    [(SMOLLM2, 106.2, 28.3, 69_120, 23_040), (LLAMA_1B, 973.1, 262.7, 131_072, 32_768), (LLAMA_8B, 6979, 525, 524_288, 131_072)],
)
def test_sizes_of_known_models(sizes: Sizes, layers: float, head: float, attention: int, kv: int) -> None:
    dims = ModelDims.of(sizes, "bf16", sizes.kv_bytes)
    assert dims.layer_parameters / 1e6 == pytest.approx(layers, rel=1e-3)
    assert dims.head_parameters / 1e6 == pytest.approx(head, rel=1e-3)
    assert (dims.attention_flops, dims.kv_bytes, dims.weight_bytes) == (attention, kv, 2)


def test_a_step_costs_what_the_formula_says() -> None:
    dims = ModelDims.of(SMOLLM2, "bf16", SMOLLM2.kv_bytes)
    rates = MachineRates(4e11, 3e10, "nominal")
    meter = LimitMeter(dims, rates)
    meter(StepShape(num_decode=64, num_prefill=100, num_logits=65, decode_context=64 * 300, prefill_attention=100 * 50.0, seconds=0.1))
    linear = 2 * dims.layer_parameters * 164 + 2 * dims.head_parameters * 65
    weights = 2 * (dims.layer_parameters + dims.head_parameters)
    least = (
        max(weights / 3e10, linear / 4e11)
        + max(23_040 * 19_200 / 3e10, 69_120 * 19_200 / 4e11)
        + 69_120 * 5000 / 4e11
        + 4 * 49_152 * 65 / 3e10
    )
    assert meter.least_seconds == pytest.approx(least)
    report = meter.against(0.2)
    assert report.fraction == pytest.approx(least / 0.2)
    assert 0 < report.mfu < 1
    assert 0 < report.mbu < 1


def test_a_step_without_logits_reads_no_head() -> None:
    dims = ModelDims.of(SMOLLM2, "float32", 2 * SMOLLM2.kv_bytes)
    meter = LimitMeter(dims, MachineRates(math.inf, 1.0, "nominal"))
    meter(StepShape(0, 512, 0, 0, 512 * 256.0, 0.1))
    assert meter.least_seconds == 4 * dims.layer_parameters


def test_no_steps_no_limit() -> None:
    meter = LimitMeter(ModelDims.of(SMOLLM2, "bf16", SMOLLM2.kv_bytes), MachineRates(1.0, 1.0, "nominal"))
    assert meter.against(1.0).fraction == 0.0


def test_the_gap_is_told_by_size() -> None:
    meter = LimitMeter(ModelDims.of(SMOLLM2, "bf16", SMOLLM2.kv_bytes), MachineRates(1e12, 1e11, "nominal"))
    seconds = {"run": 10.0, "prefill": 2.0, "decode": 5.0, "sample": 2.0, "host": 0.001}
    reasons = gap_reasons(meter, seconds, recomputed=5, computed=100)
    assert [reason.split("%")[0] for reason in reasons] == ["70", "20", "10", "5.0"]


def test_rates_are_measured_a_few_times_and_the_best_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHINFER_CACHE", str(tmp_path))
    first = machine_rates("float32")
    assert first.source == "measured"
    for _ in range(3):
        known = machine_rates("float32")
    assert machine_rates("float32") == known
    assert known.flops >= first.flops
    assert first.flops > 1e8
    assert first.bytes > 1e8
    better = machine_rates("float32", again=True)
    assert better.flops >= first.flops
    assert better.bytes >= first.bytes
    path = tmp_path / "machine-rates.json"
    (key,) = json.loads(path.read_text())
    assert torch.__version__ in key
    path.write_text("{ torn")
    assert machine_rates("float32").source == "measured"
