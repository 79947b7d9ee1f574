"""The ablation, with a measure and a clock of the tests' own: what it finds, in what order it runs, and when it stops."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from batchinfer.core.request import Request, SamplingParams
from batchinfer.errors import ConfigError
from batchinfer.reports.ablation import SLICE, WHOLE, Ablation, Column
from batchinfer.reports.ablation_report import AblationReport
from batchinfer.reports.ablation_table import ablation_picture
from batchinfer.reports.latency import Waits
from batchinfer.reports.measurement import Facts, Measurement, TooSlow
from batchinfer.reports.provenance import Provenance
from batchinfer.reports.variants import BASELINE, FEATURES, NAMES, Variant, baseline, chosen_features, ladder, leave_one_out
from batchinfer.reports.workload import Workload
from tests.cli.conftest import Cli

ROWS = Workload("rows", [Request(i, np.zeros(50, np.int32), SamplingParams(max_tokens=100, ignore_eos=True)) for i in range(256)])
SLOW = {"kv_cache": 40.0}  # times as long without


@dataclass
class Machine:
    """Runs nothing: every run takes what its missing features cost, with noise, on a clock of its own."""

    costs: dict[str, float] = field(default_factory=dict)  # a feature's worth: the run takes so many times as long without it
    noise: float = 0.0
    seed: int = 0
    token_s: float = 0.0005
    drift: float = 0.0  # how much slower the machine becomes by the second
    now: float = 0.0
    ran: list[tuple[str, int, int]] = field(default_factory=list)  # variant, rows, output tokens
    interrupt_at: int | None = None
    too_slow: str = ""
    deadline: float = math.inf

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def give_up_at(self, moment: float) -> None:
        self.deadline = moment

    def clock(self) -> float:
        return self.now

    def measure(self, variant: Variant, workload: Workload) -> Measurement:
        if self.interrupt_at is not None and len(self.ran) >= self.interrupt_at:
            raise KeyboardInterrupt
        if variant.name == self.too_slow:
            raise TooSlow
        values = dict(variant.changes)
        slower = math.prod(
            {**SLOW, **self.costs}.get(feature.name, 1.0) for feature in FEATURES if values.get(feature.setting) == feature.off
        )
        if values.get("num_speculative_tokens") is not None:
            slower *= self.costs.get("fixed", 1.0)
        tokens, prompts = workload.most_output_tokens, workload.prompt_tokens
        prefill = 0.1 * self.token_s * prompts * slower
        seconds = (prefill + self.token_s * tokens * slower) * math.exp(self.rng.normal(0, self.noise)) * (1 + self.drift * self.now)
        self.now += 0.05  # building the engine
        if self.now + seconds > self.deadline:
            self.now = max(self.now, self.deadline)
            raise TooSlow
        self.now += seconds
        self.ran.append((variant.name, len(workload.requests), tokens))
        outputs = {
            r.row: np.full(r.params.max_tokens, 1 if values["quantization"] == "int8" else r.row % 2, np.int32) for r in workload.requests
        }
        at_once = min(variant.concurrency, len(workload.requests))
        facts = Facts(prompts, prefill, 0.3, 0, at_once, 100, 1000, 200, 100, 1024)
        itl = 1e3 * self.token_s * at_once * slower
        return Measurement(seconds, tokens, Waits(10, 15, 20, 5), Waits(itl, 1.5 * itl, 2 * itl, 50), 33, outputs, facts)


def columns(counts: Sequence[int] = (64,), climb: bool = False, names: Sequence[str] | None = None) -> list[Column]:
    chosen = chosen_features(names)
    return [Column(n, baseline(FEATURES, n), leave_one_out(FEATURES, chosen, n), ladder(FEATURES, n) if climb else ()) for n in counts]


def ablated(machine: Machine, budget_s: float = 480, repeats: int | None = None, **more: object) -> AblationReport:
    ablation = Ablation(machine.measure, machine.clock, lambda line: None, budget_s, repeats, machine.give_up_at)
    ablation.run(columns(**more), ROWS)  # type: ignore[arg-type]
    provenance = Provenance("m", "rows", 256, 1, 1, 0, ablation.choices)
    return AblationReport.of(ablation, provenance, {})


def test_a_planted_slowdown_is_found_under_noise() -> None:
    """20 % slower with the feature: the ratio is 1 / 1.2, and its interval leaves 1.0 out, in 19 of 20 ablations and more."""
    found, falsely = 0, 0
    for seed in range(20):
        report = ablated(Machine({"paged": 1 / 1.2}, noise=0.05, seed=seed))
        by_name = {result.name: result for result in report.features}
        paged = by_name["paged"]
        assert paged.ratio.value == pytest.approx(1 / 1.2, rel=0.12)
        found += paged.ratio.differs_from_one
        falsely += sum(by_name[name].ratio.differs_from_one for name in ("graphs", "prefix_order", "flash_attention"))
        assert paged.why
    assert found >= 19
    assert falsely <= 7  # of 60, at a level of 95 %


def test_two_ablations_agree_within_their_intervals() -> None:
    worth = {"prefix_cache": 1.5, "quantization": 1.7, "graphs": 1.1}
    apart = total = 0
    for seed in range(10):
        one, two = (ablated(Machine(worth, noise=0.05, seed=100 * seed + n)) for n in (1, 2))
        others = {result.name: result.ratio for result in two.features}
        for result in one.features:
            mine, other = result.ratio, others[result.name]
            if mine.low is None or mine.high is None or other.low is None or other.high is None:
                continue
            total += 1
            apart += mine.high < other.low or other.high < mine.low
    assert total >= 100
    assert apart <= 0.05 * total


def test_a_machine_that_slows_down_all_the_time_spoils_nothing() -> None:
    report = ablated(Machine({"prefix_cache": 1.5}, drift=0.01))
    worth = {result.name: result.ratio.value for result in report.features}
    assert worth.pop("prefix_cache") == pytest.approx(1.5, rel=0.02)
    assert worth.pop("kv_cache") == pytest.approx(40, rel=0.3)
    assert all(value == pytest.approx(1.0, rel=0.03) for value in worth.values())


@pytest.mark.parametrize("budget_s", [40, 120, 480])
@pytest.mark.parametrize("token_s", [0.0002, 0.002, 0.01])
def test_the_budget_is_kept(budget_s: float, token_s: float) -> None:
    machine = Machine({"flash_attention": 6.0, "quantization": 1.6, "continuous_batching": 2.0}, noise=0.1, token_s=token_s)
    report = ablated(machine, budget_s, counts=(1, 64), climb=True)
    assert machine.now <= budget_s + 25
    assert {result.concurrency for result in report.features} >= ({1, 64} if budget_s / token_s > 20_000 else {1})
    assert any("round" in line for line in report.provenance.choices)


def test_runs_are_interleaved_and_rotated() -> None:
    machine = Machine()
    report = ablated(machine, repeats=4)
    whole = max(rows for _, rows, _ in machine.ran)
    size = max(tokens for _, rows, tokens in machine.ran if rows == whole)
    names = [name for name, _, tokens in machine.ran if tokens == size]
    rounds = [list(part.split("|")) for part in "|".join(names).split(f"{BASELINE}|{BASELINE}")]
    assert len(rounds) == 4
    first = [next(name for name in part if name and name != BASELINE) for part in rounds]
    assert len(set(first)) > 2
    assert all(result.ratio.rounds == (3 if result.part == SLICE else 4) for result in report.features)


def test_the_most_valuable_comes_first_and_slow_ones_are_measured_on_a_slice() -> None:
    report = ablated(Machine({"prefix_cache": 1.5, "flash_attention": 8.0, "graphs": 0.9, "fixed": 1.2}))
    assert [result.name for result in report.features[:3]] == ["kv_cache", "flash_attention", "prefix_cache"]
    by_name = {result.name: result for result in report.features}
    assert (by_name["kv_cache"].part, by_name["flash_attention"].part, by_name["prefix_cache"].part) == (SLICE, SLICE, WHOLE)
    assert by_name["kv_cache"].ratio.value == pytest.approx(40, rel=0.01)
    assert by_name["speculation_fixed"].ratio.value == pytest.approx(1 / 1.2, rel=0.01)
    assert by_name["speculation_adaptive"].ratio.value == pytest.approx(1.0, rel=0.01)
    assert report.features[-1].name == "speculation_fixed"
    assert "20% of the guessed tokens were right" in by_name["speculation_fixed"].why
    assert any("slice of 8 rows" in line and "without kv_cache" in line for line in report.provenance.choices)


def test_agreement_is_with_everything_on() -> None:
    by_name = {result.name: result.agreement for result in ablated(Machine()).features}
    assert by_name["paged"].share == 1.0
    quantised = by_name["quantization"]
    assert quantised.identical_share == pytest.approx(0.5, abs=0.05)
    assert quantised.until_difference == 0.0


def test_the_ladder_climbs_from_the_naive_loop() -> None:
    report = ablated(Machine({"flash_attention": 3.0, "quantization": 1.5}), climb=True)
    assert [rung.rung.name for rung in report.ladder] == ["naive", *NAMES]
    gains = {rung.rung.name: rung.gain.value for rung in report.ladder if rung.gain is not None}
    assert gains["kv_cache"] == pytest.approx(40, rel=0.01)
    assert gains["flash_attention"] == pytest.approx(3, rel=0.01)
    assert gains["paged"] == pytest.approx(1, rel=0.01)
    assert report.ladder[0].gain is None
    assert report.ladder[-1].speedup == pytest.approx(40 * 3 * 1.5, rel=0.05)
    rates = [rung.rate for rung in report.ladder]
    assert rates[0] == min(rates)


def test_ctrl_c_reports_what_was_measured() -> None:
    machine = Machine()
    ablated(machine, repeats=3)
    whole = [index for index, (_, _, tokens) in enumerate(machine.ran) if tokens == max(t for _, _, t in machine.ran)]
    stopped = Machine(interrupt_at=whole[0] + 6)
    report = ablated(stopped, repeats=3)
    assert report.interrupted
    assert 2 <= len(report.features) < 12
    assert all(result.ratio.low is None for result in report.features)
    assert any("not reached" in line for line in report.not_measured)
    early = ablated(Machine(interrupt_at=1))
    assert early.interrupted
    assert not early.features


def test_a_variant_that_never_ends_is_given_up_and_named() -> None:
    report = ablated(Machine(too_slow="without flash_attention"))
    assert "flash_attention" not in {result.name for result in report.features}
    assert report.not_measured == ["flash_attention at 64: without flash_attention took longer than there was time for"]


def test_features_are_chosen_by_name() -> None:
    report = ablated(Machine(), names=["speculation", "paged"])
    assert {result.name for result in report.features} == {"paged", "speculation_fixed", "speculation_adaptive"}
    with pytest.raises(ConfigError, match="no such feature"):
        chosen_features(["pagd"])
    with pytest.raises(ConfigError, match="not available on this device"):
        chosen_features(["quantization"], [f for f in FEATURES if f.name != "quantization"])


@pytest.mark.parametrize("width", [80, 160])
def test_the_tables_fit(width: int) -> None:
    report = ablated(Machine({"quantization": 1.5, "graphs": 0.9}, noise=0.02), counts=(1, 64), climb=True)
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(ablation_picture(report))
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for words in ("prefix_cache", "kv_cache", "64 at once", "95%", "ladder", "+ speculation", "0.90x", "first token median"):
        assert words in text


KEYS = {"name", "concurrency", "ratio", "ratio_low", "ratio_high", "output_tokens_per_s_on", "output_tokens_per_s_off"}


def test_the_command_writes_its_keys(cli: Cli, tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    said = cli(
        "ablate", "-m", tiny_folder, "--fake-model", "--concurrency", "2", "--concurrency", "4", "--features", "paged,speculation",
        "--ladder", "--rows", "6", "--repeats", "2", "--budget-s", "300", "--json", path, "--no-prefix-caching",
    )  # fmt: skip
    assert said.code == 0, said.err
    found = json.loads(path.read_text())
    assert KEYS | {"ttft_ms", "itl_ms", "peak_blocks", "token_agreement"} <= found["features"][0].keys()
    assert {(f["name"], f["concurrency"]) for f in found["features"]} == {
        (name, n) for name in ("paged", "speculation_adaptive", "speculation_fixed") for n in (2, 4)
    }
    assert {"name", "concurrency", "output_tokens_per_s", "gain"} <= found["ladder"][0].keys()
    assert {"command", "machine", "versions", "seeds", "workload", "choices", "settings"} <= found.keys()
    assert "prefix_cache" not in {rung["name"] for rung in found["ladder"]}
    assert any("prefix_cache is off on the command line" in line for line in found["choices"])
    assert all(f["ttft_ms"]["p50"] > 0 for f in found["features"])
    assert "worth" in said.err
    assert "round 1 of 2" in said.err


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--concurrency 0", "must be from 1"),
        ("--concurrency x", "not a whole number"),
        ("--features pages", "no such feature"),
        ("--repeats 0", "at least 1"),
        ("--budget-s 1", "at least 5"),
        ("--num-kv-blocks 9", "--kv-cache-memory"),
    ],
)
def test_wrong_settings_are_refused(cli: Cli, tiny_folder: Path, flags: str, words: str) -> None:
    said = cli("ablate", "-m", tiny_folder, *flags.split())
    assert said.code == 2
    assert words in said.err
