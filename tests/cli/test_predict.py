"""Predictions: schedules by hand, samples of long inputs, GPUs from data sheets, and the figures beside a run's own."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from batchinfer.build import JobNeed, ModelHandle, compute_target, engine_limits, open_model
from batchinfer.config import EngineConfig
from batchinfer.core.request import Request, SamplingParams
from batchinfer.core.stats import StepShape
from batchinfer.core.step_cost import StepCost
from batchinfer.errors import CapacityError, ConfigError
from batchinfer.job import JobReport
from batchinfer.reports import predict as predicting
from batchinfer.reports.gpus import GPUS, GpuRun, gpu_named, gpu_step_cost
from batchinfer.reports.lengths import RowLengths
from batchinfer.reports.metering import RunMeter
from batchinfer.reports.outlook import look_ahead
from batchinfer.reports.place import kv_fits, on_gpu, this_machine
from batchinfer.reports.plan import JobPlan, RowTally, fit_of, plan_picture
from batchinfer.reports.predict import Prediction, RowSample, StepForecast, predict
from batchinfer.reports.summary import RunSummary, end_table
from tests.cli.conftest import Cli
from tests.cli.test_limit import LLAMA_1B, SMOLLM2, Sizes

TOY = StepCost(layers=((1.0, 1.0), (2.0, 2.0)), head=((1.0, 10.0), (2.0, 20.0)), decode_read=0.0, prefill_pair=0.0, constant=100.0)
CPU = EngineConfig(device="cpu", dtype="float32", block_size=16)


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> ModelHandle:
    return open_model(EngineConfig(model=str(tiny_folder), device="cpu"))


def row(number: int, prompt: list[int], max_tokens: int) -> Request:
    return Request(number, np.array(prompt, np.int32), SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def foresee(model: ModelHandle, rows: list[Request], cost: StepCost = TOY, **options: Any) -> Prediction:
    config = replace(CPU, **options)
    limits, _ = engine_limits(config, model, compute_target(config, model), JobNeed(5000))
    sample = RowSample()
    for request in rows:
        sample.see(request)
    found = predict(config, model, limits, cost, sample)
    assert found is not None
    return found


def test_one_row_after_the_other_by_hand(model: ModelHandle) -> None:
    """3 prompt tokens and 3 to generate: 113, 111, 111; then 2 and 2: 112, 111."""
    found = foresee(model, [row(0, [1, 2, 3], 3), row(1, [4, 5], 2)], max_num_seqs=1)
    assert found.seconds == pytest.approx(335 + 223)
    assert (found.steps, found.output_tokens, found.prompt_tokens) == (5, 5, 5)
    assert found.ttft_ms is not None
    assert found.itl_ms is not None
    assert found.ttft_ms.p50 == pytest.approx(112_500)  # 113 and 112, from each row's own admission
    assert found.itl_ms.p50 == pytest.approx(111_000)
    assert (found.peak_running, found.preemptions) == (1, 0)


def test_two_rows_at_once_by_hand(model: ModelHandle) -> None:
    """5 tokens and 2 logit rows: 125; 2 and 2: 122; the longer row alone: 111."""
    found = foresee(model, [row(0, [1, 2, 3], 3), row(1, [4, 5], 2)], max_num_seqs=2)
    assert found.seconds == pytest.approx(358)
    assert found.ttft_ms is not None
    assert found.itl_ms is not None
    assert (found.ttft_ms.p50, found.ttft_ms.p99) == (125_000, 125_000)
    assert found.itl_ms.p50 == pytest.approx(122_000)  # of 122, 122, 111
    assert (found.peak_running, found.peak_blocks) == (2, 2)
    assert found.output_tokens_per_s == pytest.approx(5 / 358)


def test_several_answers_to_a_prompt_by_hand(model: ModelHandle) -> None:
    """3 prompt tokens: 113. Then a token each and, for the second answer, the prompt's last: 122. Then 122, and 111 for the later one."""
    [asked] = [replace(row(0, [1, 2, 3], 3), params=SamplingParams(max_tokens=3, n=2))]
    found = foresee(model, [asked], max_num_seqs=4)
    assert found.seconds == pytest.approx(113 + 122 + 122 + 111)
    assert (found.prompt_tokens, found.output_tokens, found.rows, found.peak_running, found.peak_blocks) == (3, 6, 1, 2, 2)
    assert found.ttft_ms is not None
    assert found.itl_ms is not None
    assert (found.ttft_ms.p50, found.itl_ms.p50) == (pytest.approx(117_500), 122_000)  # of 113 and 122; of 122, 122, 122, 111
    apart = foresee(model, [asked], max_num_seqs=4, prefix_caching=False)
    assert apart.seconds == pytest.approx(113 + 124 + 122 + 111)  # the prompt twice


def test_lengths_of_rows_of_several_answers() -> None:
    rows = [row(n, [1] * prompt, most) for n, (prompt, most) in enumerate([(40, 24), (16, 1), (5, 3)])]
    lengths = RowLengths.of(replace(each, params=replace(each.params, n=n)) for each, n in zip(rows, (3, 1, 2), strict=True))
    assert (len(lengths), lengths.num_answers, lengths.generated.tolist()) == (3, 6, [72, 1, 6])
    assert sorted(lengths.per_answer().tolist()) == [8, 8, 17, 64, 64, 64]
    assert lengths.held(True).tolist() == [112, 17, 11]
    assert lengths.held(False).tolist() == [192, 17, 16]
    assert lengths.blocks(16, 100, shared=False) == 3 * 4 + 2 + 2
    assert lengths.blocks(16, 100, shared=True) == (2 + 3 * 2) + (1 + 1) + 2
    assert lengths.blocks(16, 2, shared=True) == 2 + 2 * 2, "two answers at once, of the longest row"
    assert len(RowLengths.of([])) == 0


def test_a_plan_counts_every_answer(cli: Cli, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchinfer.build.step_cost", lambda config, model: TOY)

    def planned(n: int, *flags: str) -> dict[str, Any]:
        lines = [json.dumps({"prompt_token_ids": [*range(70), 80 + i], "max_tokens": 20, "n": n, "logprobs": 2}) for i in range(30)]
        (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
        said = cli("plan", tmp_path / "in.jsonl", "-m", tiny_folder, "--json", tmp_path / "plan.json", *flags)
        assert said.code == 0, said.err
        assert (f"at most {600 * n:,} in all in {30 * n} answers; each least 20" in " ".join(said.err.split())) == (n > 1)
        return dict(json.loads((tmp_path / "plan.json").read_text()))

    one, four = planned(1), planned(4)
    assert (one["tokens"], four["tokens"]) == ({"prompt": 2130, "output_at_most": 600}, {"prompt": 2130, "output_at_most": 2400})
    assert (one["answers"], four["answers"]) == (30, 120)
    assert one["outlook"]["kv"][0]["blocks_needed"] == 30 * 3
    assert four["outlook"]["kv"][0]["blocks_needed"] == 30 * (2 + 4 * 1)  # 71 and 20 tokens in blocks of 32: two are shared
    assert planned(4, "--no-prefix-caching")["outlook"]["kv"][0]["blocks_needed"] == 120 * 3
    few = ("--concurrency", "8", "--num-kv-blocks", "12")
    assert (planned(1, *few)["fit"]["rows_at_once"], planned(4, *few)["fit"]["rows_at_once"]) == (4, 2)
    prediction = four["outlook"]["prediction"]
    assert (prediction["rows"], prediction["peak_running"]) == (30, 120)
    assert one["outlook"]["prediction"]["seconds"] < prediction["seconds"] < 4 * one["outlook"]["prediction"]["seconds"]
    assert one["least_seconds"] < four["least_seconds"] < 5 * one["least_seconds"]


def test_the_switches_of_the_engine_change_the_prediction(model: ModelHandle) -> None:
    shared = list(range(64))
    rows = [row(n, [*shared, 70 + n], 4) for n in range(8)]
    with_cache, without = foresee(model, rows), foresee(model, rows, prefix_caching=False)
    assert with_cache.prefix_hit_rate == pytest.approx(7 * 64 / (8 * 65))
    assert without.prefix_hit_rate == 0
    assert with_cache.seconds < without.seconds
    assert foresee(model, rows, num_kv_blocks=8).peak_running < 8


def test_a_job_of_rows_that_cannot_run_is_no_prediction(model: ModelHandle) -> None:
    limits, _ = engine_limits(CPU, model, compute_target(CPU, model), JobNeed(100))
    assert predict(CPU, model, limits, TOY, RowSample()) is None


def test_a_sample_counts_everything_and_keeps_even_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicting, "MOST_ROWS", 256)
    sample = RowSample(output_length=10)
    for number in range(5000):
        sample.see(row(number, [number % 7] * 3, 5 + number % 20))
    assert (sample.rows, sample.prompt_tokens) == (5000, 15_000)
    assert sample.output_tokens == sum(min(5 + n % 20, 10) for n in range(5000))
    kept = sample.requests(rows_at_once=64)
    assert 64 < len(kept) <= 256
    assert [request.row for request in kept] == list(range(len(kept)))
    assert all(request.params.max_tokens <= 10 for request in kept)
    assert len(sample.requests(rows_at_once=1)) <= len(kept)


def test_a_part_of_a_long_input_stands_for_the_whole(model: ModelHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    rows = [row(n, rng.integers(0, 200, rng.integers(5, 60)).tolist(), int(rng.integers(5, 40))) for n in range(1024)]
    whole = foresee(model, rows, max_num_seqs=16)
    monkeypatch.setattr(predicting, "MOST_ROWS", 256)
    part = foresee(model, rows, max_num_seqs=16)
    assert (whole.rows_simulated, part.rows) == (1024, 1024)
    assert part.rows_simulated <= 256
    assert part.seconds == pytest.approx(whole.seconds, rel=0.1)
    assert part.output_tokens == pytest.approx(whole.output_tokens, rel=0.1)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.title)
def test_gpus_are_what_gpus_are(gpu: Any) -> None:
    assert 16e9 <= gpu.memory <= 300e9
    assert 0.2e12 <= gpu.bandwidth <= 10e12
    assert 2 * gpu.bf16 - 5e12 <= gpu.int8 <= 4 * gpu.bf16
    assert gpu.fp8 is None or gpu.bf16 < gpu.fp8 <= gpu.int8
    assert 50 < gpu.bf16 / gpu.bandwidth < 500  # operations a byte
    assert "https://" in gpu.source


def test_gpus_go_by_the_names_people_use() -> None:
    assert gpu_named("RTX 4090") is gpu_named("geforce-rtx-4090") is GPUS["4090"]
    assert gpu_named("NVIDIA H200") is GPUS["h200"]
    with pytest.raises(ConfigError, match="--gpu voodoo: not in the table; known: b200, h200"):
        gpu_named("voodoo")


def test_what_a_gpu_would_take_is_near_what_was_published() -> None:
    """Qwen3-8B in bf16, 256 requests of 1,024 + 1,024 tokens on an H200: 8,497 output tokens/s (lmsys.org, 2025-09-22, FlashInfer)."""
    qwen3_8b = Sizes(151_936, 4096, 12_288, 36, 32, 8, 128)
    cost = gpu_step_cost(GPUS["h200"], qwen3_8b, GpuRun("none", qwen3_8b.kv_bytes))
    decode = 1024 * cost.seconds(256, 256, 256 * 1536)
    prefill = 256 * 1024 / 8192 * cost.seconds(8192, 8, 0, 8192 * 512)
    assert 256 * 1024 / (decode + prefill) == pytest.approx(8497, rel=0.25)


def test_features_change_what_a_gpu_takes() -> None:
    plain = GpuRun("none", SMOLLM2.kv_bytes)
    h200 = GPUS["h200"]

    def seconds(run: GpuRun, tokens: int = 64) -> float:
        return float(gpu_step_cost(h200, LLAMA_1B, run).seconds(tokens, tokens, 512 * tokens, 0.0))

    assert seconds(replace(plain, quantization="int8")) < seconds(plain)
    assert seconds(replace(plain, kv_bytes_per_token=plain.kv_bytes_per_token // 2)) < seconds(plain)
    assert seconds(plain) < seconds(replace(plain, flash_attention=False))
    assert seconds(plain) < seconds(replace(plain, graphs=False))
    assert seconds(plain, 1) == pytest.approx(seconds(plain, 2), rel=0.05)  # reading the weights is all there is
    big = gpu_step_cost(h200, LLAMA_1B, plain)
    assert big.seconds(4096, 0) - big.seconds(2048, 0) == pytest.approx(2 * 973.1e6 * 2048 / (0.65 * 989e12), rel=0.01)


def test_a_model_that_does_not_fit_a_gpu_is_refused_with_its_sizes(model: ModelHandle) -> None:
    config = EngineConfig(num_kv_blocks=10**9)
    with pytest.raises(
        CapacityError, match=r"NVIDIA L4: the weights take .* GB of 21.6 GB that can be used, and a KV pool of 1,000,000,000"
    ):
        on_gpu(GPUS["l4"], config, model)
    with pytest.raises(ConfigError, match="planned for in bf16"):
        on_gpu(GPUS["l4"], CPU, model)


def test_fewer_bits_of_keys_and_values_fit_more(model: ModelHandle) -> None:
    lengths = RowLengths(np.full(400, 200), np.full(400, 100), np.ones(400, np.int64))
    place = this_machine(replace(CPU, kv_cache_memory=2**20), model, lengths)
    fits = {fit.dtype: fit for fit in kv_fits(place, model, lengths, None)}
    assert list(fits) == ["float32", "bf16", "int8"]
    assert fits["float32"].blocks_that_fit < fits["bf16"].blocks_that_fit < fits["int8"].blocks_that_fit
    assert fits["float32"].rows_at_once < fits["int8"].rows_at_once
    assert fits["int8"].blocks_needed == 256 * 19  # the rows that may run at once, 300 tokens in blocks of 16
    assert len({fit.blocks_that_fit for fit in kv_fits(place, model, lengths, 50)}) == 1


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("gpu", [None, "h200"])
def test_a_plan_fits_the_terminal(model: ModelHandle, width: int, gpu: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchinfer.build.step_cost", lambda config, model: TOY)
    named = None if gpu is None else GPUS[gpu]
    config = replace(CPU, dtype="auto")
    tally = RowTally(model.max_model_len)
    tally.count([row(n, list(range(10 + n)), 5) for n in range(30)])
    place = this_machine(config, model, tally.lengths()) if named is None else on_gpu(named, config, model)
    outlook = look_ahead(config, model, place, tally.sample, named)
    plan = JobPlan("in.jsonl", "m", True, tally, fit_of(place, tally), 1.0, None, outlook)
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(plan_picture(plan))
    text = stream.getvalue()
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    for words in ("expected", "first token", "between tokens", "prefix cache", "blocks that fit", "int8", "30 rows at once"):
        assert words in text
    assert ("data sheet" in " ".join(text.split())) == (gpu is not None)


def test_plan_says_how_long_it_will_take(cli: Cli, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchinfer.runtime.calibration.POINT_SECONDS", 0.0)
    lines = [json.dumps({"prompt_token_ids": [*range(40), 50 + n], "max_tokens": 6}) for n in range(20)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    args = (tmp_path / "in.jsonl", "-m", tiny_folder, "--json", tmp_path / "plan.json")

    def outlook(*more: str) -> dict[str, Any]:
        said = cli("plan", *args, *more)
        assert said.code == 0, said.err
        found: dict[str, Any] = json.loads((tmp_path / "plan.json").read_text())
        assert {"input", "model", "rows", "errors", "duplicate_ids", "tokens", "fit", "least_seconds", "outlook"} <= set(found)
        assert "expected" in said.err
        return dict(found["outlook"])

    here = outlook()
    assert here["source"] == "measured"
    assert set(here) >= {"device", "prediction", "prefix_share", "order", "kv", "weight_bytes", "kv_bytes_at_peak", "gpu"}
    assert set(here["prediction"]) >= {
        "seconds",
        "output_tokens_per_s",
        "ttft_ms",
        "itl_ms",
        "peak_blocks",
        "preemptions",
        "rows_simulated",
    }
    assert here["prefix_share"] == pytest.approx(19 * 32 / (20 * 41), abs=1e-4)
    assert outlook("--no-prefix-caching")["prefix_share"] == 0
    assert outlook("--concurrency", "4")["prediction"]["peak_running"] == 4
    assert (here["speculation_ignored"], outlook("--speculative", "ngram")["speculation_ignored"]) == (False, True)
    slabs = outlook("--no-paged", "--num-kv-blocks", "48")  # 512 tokens for each row, in blocks of 32
    assert slabs["prediction"]["peak_running"] == slabs["kv"][0]["rows_at_once"] == 3
    assert outlook("--output-length", "2")["prediction"]["steps"] < here["prediction"]["steps"]
    there = outlook("--gpu", "rtx 4090", "--kv-cache-dtype", "int8")
    assert (there["device"], there["gpu"]["bandwidth"], there["kv"][0]["dtype"]) == ("GeForce RTX 4090", 1.008e12, "int8")
    assert cli("plan", *args, "--gpu", "abacus").code == 2
    assert cli("plan", *args, "--output-length", "0").code == 2


def shape(tokens: int, seconds: float) -> StepShape:
    return StepShape(num_decode=tokens, num_prefill=0, num_logits=1, decode_context=0, prefill_attention=0.0, seconds=seconds)


def test_predicted_seconds_stand_beside_those_of_the_clock() -> None:
    meter = RunMeter()
    meter.forecast = StepForecast(TOY)
    for tokens, seconds in ((1, 120.0), (3, 130.0)):
        meter.step(shape(tokens, seconds))
    report = JobReport(input="", output="", model="")
    report.seconds.run = 300.0
    found = meter.summary(report)
    assert (found.as_dict()["predicted_seconds"], found.as_dict()["step_seconds"]) == (111 + 113, 250.0)
    stream = io.StringIO()
    Console(file=stream, width=100).print(end_table(found))
    assert "predicted 3 min 44 s from this machine's calibration, measured 4 min 10 s" in stream.getvalue()


def test_nothing_is_predicted_where_nothing_was_measured(model: ModelHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job does not wait for a calibration; with drafts a step's shape does not tell its cost."""
    monkeypatch.setenv("BATCHINFER_CACHE", str(tmp_path))
    meter = RunMeter()
    meter.build_engine(replace(CPU, model=str(model.files.path)), model, JobNeed(500))
    assert meter.forecast is None
    assert not (tmp_path / "step-costs.json").exists()
    report = RunSummary.of(JobReport(input="", output="", model=""), None, StepForecast(TOY)).as_dict()
    assert (report["predicted_seconds"], report["step_seconds"]) == (None, None)
