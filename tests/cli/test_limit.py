"""The physical limit: sizes of known models, the formula, and the calibration's cache."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from batchinfer.core.stats import StepShape
from batchinfer.layers.kinds import choose_linear
from batchinfer.machine import Memory, largest_cache
from batchinfer.model.footprint import head_bytes, linear_bytes
from batchinfer.ops.layouts import Dense, Int8Channel, Layout, OneDnnBf16
from batchinfer.reports import rates
from batchinfer.reports.limit import LimitMeter, ModelDims, gap_reasons
from batchinfer.reports.rates import Arithmetic, MachineRates, machine_rates


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
BF16 = Arithmetic("bf16")
LLAMA_8B = Sizes(128256, 4096, 14336, 32, 32, 8, 128)


@pytest.mark.parametrize(
    "sizes, layers, head, attention, kv",
    [(SMOLLM2, 106.2, 28.3, 69_120, 23_040), (LLAMA_1B, 973.1, 262.7, 131_072, 32_768), (LLAMA_8B, 6979, 525, 524_288, 131_072)],
)
def test_sizes_of_known_models(sizes: Sizes, layers: float, head: float, attention: int, kv: int) -> None:
    dims = ModelDims.of(sizes, BF16, sizes.kv_bytes)
    assert dims.layer_parameters / 1e6 == pytest.approx(layers, rel=1e-3)
    assert dims.head_parameters / 1e6 == pytest.approx(head, rel=1e-3)
    assert (dims.attention_flops, dims.kv_bytes) == (attention, kv)
    assert (dims.layer_bytes, dims.head_bytes) == (2 * dims.layer_parameters, 2 * dims.head_parameters)


@pytest.mark.parametrize(
    "quantization, dtype, layers, head", [("int8", "bf16", 1, 1), ("int8", "float32", 1, 1), ("int4", "bf16", 0.625, 1)]
)
def test_quantised_weights_are_counted_with_their_scales(quantization: str, dtype: str, layers: float, head: float) -> None:
    dims = ModelDims.of(LLAMA_1B, Arithmetic(dtype, quantization), LLAMA_1B.kv_bytes)
    assert layers <= dims.layer_bytes / dims.layer_parameters < layers + 0.005
    assert head < dims.head_bytes / dims.head_parameters < head + 0.005


def held_bytes(layout: Layout, shape: tuple[int, int], codes: float) -> float:
    """What a layout's tensors take; those that are opaque to torch hold `codes` bytes for each weight, int32 zero points do not count."""
    tensors = {name: value for name in layout.__slots__ if isinstance(value := getattr(layout, name), torch.Tensor)}
    plain = sum(value.numel() * value.itemsize for name, value in tensors.items() if name != "packed" and value.dtype is not torch.int32)
    return plain + ("packed" in tensors) * codes * shape[0] * shape[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization, codes", [("none", 2), ("int8", 1), ("int4", 0.5)])
def test_the_footprint_is_what_the_packed_layouts_hold(dtype: torch.dtype, quantization: str, codes: float) -> None:
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor does not multiply bf16")
    kind, _ = choose_linear(quantization, torch.device("cpu"), dtype)
    for shape in ((160, 96), (100, 96), (100, 72)):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(kind.weight_dtype)
        for pack, predicted in ((kind.pack, linear_bytes), (kind.head_pack, head_bytes)):
            layout = pack(weight, None)
            opaque = {Dense: dtype.itemsize, OneDnnBf16: dtype.itemsize, Int8Channel: 1}.get(type(layout), codes)
            assert predicted(shape, quantization, dtype.itemsize) == held_bytes(layout, shape, opaque)


def test_attention_is_counted_at_its_own_rate() -> None:
    dims = ModelDims.of(SMOLLM2, Arithmetic("bf16", "int8", "int8"), 12_240)
    slow = LimitMeter(dims, MachineRates(8e11, 1e15, "nominal", 4e11))
    slow(StepShape(num_decode=0, num_prefill=100, num_logits=0, decode_context=0, prefill_attention=5000.0, seconds=0.1))
    assert slow.least_seconds == pytest.approx(2 * dims.layer_parameters * 100 / 8e11 + 69_120 * 5000 / 4e11, rel=1e-3)
    assert slow.busy_seconds == pytest.approx(slow.least_seconds, rel=1e-3)
    assert "800 GFLOP/s in linear layers and 400 in attention" in slow.rates.in_words()


def test_a_step_costs_what_the_formula_says() -> None:
    dims = ModelDims.of(SMOLLM2, BF16, SMOLLM2.kv_bytes)
    rates = MachineRates(4e11, 3e10, "nominal", 4e11)
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
    dims = ModelDims.of(SMOLLM2, Arithmetic("float32"), 2 * SMOLLM2.kv_bytes)
    meter = LimitMeter(dims, MachineRates(math.inf, 1.0, "nominal", math.inf))
    meter(StepShape(0, 512, 0, 0, 512 * 256.0, 0.1))
    assert meter.least_seconds == 4 * dims.layer_parameters


def test_no_steps_no_limit() -> None:
    meter = LimitMeter(ModelDims.of(SMOLLM2, BF16, SMOLLM2.kv_bytes), MachineRates(1.0, 1.0, "nominal", 1.0))
    assert meter.against(1.0).fraction == 0.0


def test_the_gap_is_told_by_size() -> None:
    meter = LimitMeter(ModelDims.of(SMOLLM2, BF16, SMOLLM2.kv_bytes), MachineRates(1e12, 1e11, "nominal", 1e12))
    seconds = {"run": 10.0, "prefill": 2.0, "decode": 5.0, "sample": 2.0, "host": 0.001}
    reasons = gap_reasons(meter, seconds, recomputed=5, computed=100)
    assert [reason.split("%")[0] for reason in reasons] == ["70", "20", "10", "5.0"]


def test_rates_are_measured_a_few_times_and_the_best_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHINFER_CACHE", str(tmp_path))
    arithmetic = Arithmetic("float32")
    first = machine_rates(arithmetic)
    assert (first.source, first.attention_flops) == ("measured", first.flops)
    for _ in range(3):
        known = machine_rates(arithmetic)
    assert machine_rates(arithmetic) == known
    assert known.flops >= first.flops > 1e8
    assert first.bytes > 1e8
    better = machine_rates(arithmetic, again=True)
    assert better.flops >= first.flops
    assert better.bytes >= first.bytes
    path = tmp_path / "machine-rates.json"
    assert len(json.loads(path.read_text())) == 2  # float32 products, and the memory
    assert all(torch.__version__ in key for key in json.loads(path.read_text()))
    path.write_text("{ torn")
    assert machine_rates(arithmetic).source == "measured"


@pytest.mark.parametrize("cache, free, streamed", [(32, 16_000, 128), (300, 16_000, 600), (300, 2_000, 250), (300, 100, 128)])
def test_what_is_streamed_does_not_fit_into_a_cache(cache: int, free: int, streamed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In MiB: a rate of 51 GB/s was measured within a cache of 300 where the memory gave 25."""
    monkeypatch.setattr(rates, "largest_cache", lambda: cache << 20)
    monkeypatch.setattr(rates, "read_memory", lambda: Memory(free << 21, free << 20, None, None))
    assert rates._stream_bytes("cpu") == streamed << 20


def test_the_largest_cache(tmp_path: Path) -> None:
    for index, size in enumerate(("48K\n", "2048K\n", "300M\n", "odd\n", "")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size)
    assert largest_cache(tmp_path) == 300 << 20
    assert largest_cache(tmp_path / "nowhere") == 0


def test_an_8_bit_run_is_judged_by_8_bit_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over an 8-bit cache multiplies 16-bit integers: half of that rate."""
    monkeypatch.setenv("BATCHINFER_CACHE", str(tmp_path))
    both = machine_rates(Arithmetic("float32", "int8", "int8"))
    assert both.attention_flops == both.flops / 2
    cache_alone = machine_rates(Arithmetic("float32", "none", "int8"))
    assert cache_alone.attention_flops >= both.attention_flops
    weights_alone = machine_rates(Arithmetic("float32", "int8", "float32"))
    assert weights_alone.attention_flops >= cache_alone.flops
    assert len(json.loads((tmp_path / "machine-rates.json").read_text())) == 3
