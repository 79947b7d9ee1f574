"""The ablation as tables: what each feature is worth, most valuable first, and the ladder."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from batchinfer.reports.ablation import SLICE
from batchinfer.reports.ablation_report import AblationReport, FeatureResult, RungResult
from batchinfer.reports.intervals import LEVEL, Ratio, times
from batchinfer.reports.latency import Waits
from batchinfer.reports.wording import plural

BAR_CELLS = 20


def ablation_picture(report: AblationReport) -> RenderableType:
    """Everything that a person reads of an ablation."""
    parts: list[RenderableType] = [Text(report.provenance.line())]
    parts += [Text(f"chosen: {line}", style="dim") for line in report.provenance.choices]
    several = len(report.concurrencies) > 1
    if several and report.features:
        parts += [Text(), Text("what each feature is worth, by requests kept running", style="bold"), _overview(report)]
    for concurrency in report.concurrencies:
        own = [result for result in report.features if result.concurrency == concurrency]
        own.sort(key=lambda result: -result.ratio.value)
        if own:
            parts += [Text(), Text(f"each feature, with {plural(concurrency, 'request')} kept running", style="bold"), _details(own)]
            parts += _baseline_line(report, concurrency)
            parts += _whys(own)
    for concurrency in report.concurrencies:
        rungs = [rung for rung in report.ladder if rung.concurrency == concurrency]
        if rungs:
            parts += [Text(), Text(f"ladder, with {plural(concurrency, 'request')} kept running", style="bold"), _ladder(rungs)]
    parts += [Text(line, style="yellow") for line in report.not_measured]
    parts += _legend(report)
    if report.interrupted:
        parts.append(Text("stopped early: the numbers are of what was measured until then", style="yellow"))
    return Group(*parts)


def _style(ratio: Ratio) -> str:
    if ratio.value < 0.995:
        return "red" if ratio.differs_from_one else "yellow"
    return "green" if ratio.differs_from_one else ""


def _overview(report: AblationReport) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("feature", no_wrap=True)
    for concurrency in report.concurrencies:
        table.add_column(f"{concurrency} at once", justify="right", no_wrap=True)
    names = list(dict.fromkeys(result.name for result in report.features))
    by_place = {(result.name, result.concurrency): result for result in report.features}
    for name in names:
        cells = []
        for concurrency in report.concurrencies:
            result = by_place.get((name, concurrency))
            cells.append(Text("") if result is None else Text(_marked(result) + _in_brackets(result.ratio), style=_style(result.ratio)))
        table.add_row(name, *cells)
    return table


def _in_brackets(ratio: Ratio) -> str:
    return f" ({ratio.span()})" if ratio.span() else ""


def _marked(result: FeatureResult) -> str:
    return times(result.ratio.value) + ("*" if result.part == SLICE else "")


def _details(results: list[FeatureResult]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("\nfeature", no_wrap=True)
    table.add_column("\nworth", justify="right", no_wrap=True)
    table.add_column(f"{LEVEL:.0%}\ninterval", justify="right", no_wrap=True)
    for head in ("tok/s\nwithout", "first\ntoken", "next\ntoken", "peak\nblocks", "same\ntext"):
        table.add_column(head, justify="right", no_wrap=True)
    for result in results:
        style = _style(result.ratio)
        told = result.told_of
        share = result.agreement.share
        table.add_row(
            result.name,
            Text(_marked(result), style=style),
            result.ratio.span().replace(" to ", "–") or "1 round",
            f"{result.off.rate:,.0f}",
            _brief(told.ttft),
            _brief(told.itl),
            f"{told.peak_blocks:,}",
            "" if share is None else f"{share:.0%}",
        )
    return table


def _brief(waits: Waits | None) -> str:
    """Median and 99th percentile in the fewest characters: `0.8/2.1s`, `45/120ms`."""
    if waits is None:
        return ""
    if waits.p99 >= 1000:
        return f"{waits.median / 1e3:.1f}/{waits.p99 / 1e3:.1f}s"
    return f"{waits.median:.0f}/{waits.p99:.0f}ms"


def _baseline_line(report: AblationReport, concurrency: int) -> list[RenderableType]:
    side = report.baselines.get(concurrency)
    if side is None:
        return []
    waits = [f"{name} {waits.in_words()}" for name, waits in (("first token", side.ttft), ("next token", side.itl)) if waits is not None]
    return [Text("; ".join([f"everything on: {side.rate:,.0f} output tokens/s", *waits, f"{side.peak_blocks:,} blocks at most"]))]


def _whys(results: list[FeatureResult]) -> list[RenderableType]:
    return [
        Text(f"{result.name} {times(result.ratio.value)}: {result.why}", style=_style(result.ratio)) for result in results if result.why
    ]


def _ladder(rungs: list[RungResult]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("rung", no_wrap=True)
    for head in ("tokens/s", "gain", "in all"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, width=BAR_CELLS)
    most = max(rung.speedup for rung in rungs)
    for index, rung in enumerate(rungs):
        star = "*" if rung.part == SLICE else ""
        gain = "" if rung.gain is None else times(rung.gain.value)
        style = "" if rung.gain is None else _style(rung.gain)
        bar = "█" * max(1, round(BAR_CELLS * rung.speedup / most))
        name = rung.rung.name if not index else f"+ {rung.rung.name}"
        table.add_row(name, f"{rung.rate:,.0f}{star}", Text(gain, style=style), times(rung.speedup), Text(bar, style="cyan"))
    return table


def _legend(report: AblationReport) -> list[RenderableType]:
    lines = [
        "worth: throughput with everything on over throughput without the feature, paired runs; below 1.00x the feature costs.",
        "speculation_fixed: fixed length over none, its latencies are its own. First and next token: median/99th percentile without the feature.",
        "same text: share of tokens before their row's first difference from everything on.",
    ]
    parts = [*(result.part for result in report.features), *(rung.part for rung in report.ladder)]
    if SLICE in parts:
        lines.append("*: too slow for the whole workload; measured, as is what it is compared with, on the slice that is named above.")
    return [Text(), *(Text(line, style="dim") for line in lines)]
