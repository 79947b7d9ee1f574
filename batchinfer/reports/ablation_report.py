"""What an ablation found, feature by feature and rung by rung, as records and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from batchinfer.reports.ablation import SLICE, WHOLE, Ablation, ColumnRuns
from batchinfer.reports.ablation_reasons import Sides, reason_for
from batchinfer.reports.agreement import Agreement
from batchinfer.reports.intervals import LEVEL, Ratio
from batchinfer.reports.latency import Waits
from batchinfer.reports.measurement import Measurement
from batchinfer.reports.provenance import Provenance
from batchinfer.reports.variants import Comparison, Rung


@dataclass(frozen=True, slots=True)
class Side:
    """Several runs of one configuration on one part of the workload."""

    runs: Sequence[Measurement]

    @property
    def rate(self) -> float:
        """Output tokens a second, the median of the runs."""
        return median([run.rate for run in self.runs])

    @property
    def ttft(self) -> Waits | None:
        """Times to first token, the mean of the runs' percentiles."""
        return Waits.mean_of([run.ttft for run in self.runs])

    @property
    def itl(self) -> Waits | None:
        """Inter-token latencies, the mean of the runs' percentiles."""
        return Waits.mean_of([run.itl for run in self.runs])

    @property
    def peak_blocks(self) -> int:
        """Most blocks of the pool that rows held at once."""
        return max(run.peak_blocks for run in self.runs)

    def as_dict(self) -> dict[str, Any]:
        """For a JSON report."""
        ttft, itl = self.ttft, self.itl
        return {
            "output_tokens_per_s": round(self.rate, 2),
            "ttft_ms": None if ttft is None else ttft.as_dict(),
            "itl_ms": None if itl is None else itl.as_dict(),
            "peak_blocks": self.peak_blocks,
            "runs": [{"seconds": round(run.seconds, 4), "output_tokens": run.output_tokens} for run in self.runs],
        }


@dataclass(frozen=True, slots=True)
class FeatureResult:
    """What one feature is worth at one concurrency."""

    comparison: Comparison
    concurrency: int
    ratio: Ratio
    on: Side
    off: Side
    told_of: Side  # whose latencies, blocks and agreement the row tells: the one that is not the baseline
    agreement: Agreement  # with everything on
    part: str
    why: str  # one line where the feature is worth less than 1.00x, else nothing

    @property
    def name(self) -> str:
        """The feature's name in reports."""
        return self.comparison.name

    def as_dict(self) -> dict[str, Any]:
        """For a JSON report."""
        told = self.told_of.as_dict()
        return {
            "name": self.name,
            "concurrency": self.concurrency,
            "ratio": round(self.ratio.value, 4),
            "ratio_low": None if self.ratio.low is None else round(self.ratio.low, 4),
            "ratio_high": None if self.ratio.high is None else round(self.ratio.high, 4),
            "rounds": self.ratio.rounds,
            "output_tokens_per_s_on": round(self.on.rate, 2),
            "output_tokens_per_s_off": round(self.off.rate, 2),
            "ttft_ms": told["ttft_ms"],
            "itl_ms": told["itl_ms"],
            "peak_blocks": told["peak_blocks"],
            **self.agreement.as_dict(),
            "measured_on": self.part,
            "told_of": self.comparison.told_of.name,
            "about": self.comparison.about,
            "why": self.why,
        }


@dataclass(frozen=True, slots=True)
class RungResult:
    """One step of the ladder. `gain` is over the rung below, None for the lowest; `speedup` over the lowest."""

    rung: Rung
    concurrency: int
    rate: float
    gain: Ratio | None
    speedup: float
    part: str  # that `rate` was measured on

    def as_dict(self) -> dict[str, Any]:
        """For a JSON report."""
        gain = self.gain
        return {
            "name": self.rung.name,
            "concurrency": self.concurrency,
            "output_tokens_per_s": round(self.rate, 2),
            "gain": None if gain is None else round(gain.value, 4),
            "gain_low": None if gain is None or gain.low is None else round(gain.low, 4),
            "gain_high": None if gain is None or gain.high is None else round(gain.high, 4),
            "speedup": round(self.speedup, 3),
            "measured_on": self.part,
        }


@dataclass(frozen=True, slots=True)
class AblationReport:
    """Everything that an ablation found. Features stand with the most valuable first."""

    provenance: Provenance
    features: list[FeatureResult]
    ladder: list[RungResult]
    baselines: dict[int, Side]  # everything on, by concurrency
    not_measured: list[str]  # features and why
    settings: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False

    @classmethod
    def of(cls, ablation: Ablation, provenance: Provenance, settings: dict[str, Any]) -> AblationReport:
        """The report of what was measured so far."""
        features: list[FeatureResult] = []
        rungs: list[RungResult] = []
        missing: list[str] = []
        baselines: dict[int, Side] = {}
        for found in ablation.columns:
            own = found.of(WHOLE, found.column.everything)
            if own:
                baselines[found.column.concurrency] = Side(own)
            for comparison in found.column.comparisons:
                result = _feature(found, comparison)
                if result is None:
                    missing.append(_missing(found, comparison))
                else:
                    features.append(result)
            rungs += _ladder(found)
        worth = {result.name: result.ratio.value for result in features}  # at the last concurrency
        features.sort(key=lambda result: (-worth[result.name], result.name, result.concurrency))
        return cls(provenance, features, rungs, baselines, missing, settings, ablation.interrupted)

    @property
    def concurrencies(self) -> list[int]:
        """Those with a result, in the order asked for."""
        return list(dict.fromkeys([*self.baselines, *(r.concurrency for r in self.features), *(r.concurrency for r in self.ladder)]))

    def as_dict(self) -> dict[str, Any]:
        """For a JSON report."""
        return {
            "features": [result.as_dict() for result in self.features],
            "ladder": [result.as_dict() for result in self.ladder],
            "baseline": [{"concurrency": number, **side.as_dict()} for number, side in self.baselines.items()],
            "confidence_level": LEVEL,
            "not_measured": self.not_measured,
            "settings": self.settings,
            "interrupted": self.interrupted,
            **self.provenance.as_dict(),
        }


def _feature(found: ColumnRuns, comparison: Comparison) -> FeatureResult | None:
    logs = found.log_ratios(comparison.on, comparison.off)
    if not logs:
        return None
    part = found.part_of(comparison.on, comparison.off)
    on, off, told = (Side(found.of(part, variant)) for variant in (comparison.on, comparison.off, comparison.told_of))
    everything = found.of(part, found.column.everything)
    agreement = Agreement.of(everything[0].outputs, told.runs[0].outputs)
    ratio = Ratio.of_logs(logs)
    assert found.sizes is not None
    workload = found.sizes.whole if part == WHOLE else found.sizes.slice
    sides = Sides(on.runs[0].facts, off.runs[0].facts, workload, comparison.on.concurrency)
    why = reason_for(comparison.name, ratio, sides) if ratio.value < 0.995 else ""
    return FeatureResult(comparison, comparison.on.concurrency, ratio, on, off, told, agreement, part, why)


def _missing(found: ColumnRuns, comparison: Comparison) -> str:
    at = f"{comparison.name} at {found.column.concurrency}"
    slow = [v.name for v in (comparison.on, comparison.off) if v.name in found.given_up]
    return f"{at}: {' and '.join(slow)} took longer than there was time for" if slow else f"{at}: not reached"


def _ladder(found: ColumnRuns) -> list[RungResult]:
    """The rungs that were measured, from the lowest on."""
    results: list[RungResult] = []
    speedup = 1.0
    for index, rung in enumerate(found.column.rungs):
        part = SLICE if found.sizes is not None and rung.variant.name in found.sizes.slow else WHOLE
        runs = found.of(part, rung.variant)
        gain: Ratio | None = None
        if index:
            logs = found.log_ratios(rung.variant, found.column.rungs[index - 1].variant)
            gain = Ratio.of_logs(logs) if logs else None
            speedup *= math.exp(math.log(gain.value)) if gain is not None else 1.0
        if runs:
            results.append(RungResult(rung, found.column.concurrency, Side(runs).rate, gain, speedup, part))
    return results
