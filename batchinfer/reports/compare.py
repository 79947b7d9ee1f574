"""Two reports of the same command side by side: ratios, and whether they differ by more than their own spread."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from batchinfer.errors import InputFileError
from batchinfer.reports.intervals import times

Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """One number of both reports, with the range that it moved in where that is known."""

    name: str
    first: float | None
    second: float | None
    first_range: Range | None = None
    second_range: Range | None = None

    @property
    def ratio(self) -> float | None:
        """The second over the first."""
        return self.second / self.first if self.first and self.second is not None else None

    @property
    def verdict(self) -> str:
        """Whether the two differ by more than their spread."""
        if self.first_range is None or self.second_range is None:
            return ""
        apart = self.first_range[1] < self.second_range[0] or self.second_range[1] < self.first_range[0]
        return "differ" if apart else "within their spread"


def compare_files(first: Path, second: Path) -> RenderableType:
    """The table of two reports that were written with `--json`; `InputFileError` where they are not of one kind."""
    reports = _read(first), _read(second)
    kinds = [_kind_of(path, report) for path, report in zip((first, second), reports, strict=True)]
    if kinds[0] != kinds[1]:
        raise InputFileError(f"{first} is a report of {kinds[0]}, {second} one of {kinds[1]}: only reports of the same command compare")
    lines = COMPARISONS[kinds[0]](*reports)
    parts: list[RenderableType] = [Text(note) for note in _differences(*reports)]
    return Group(*parts, _table(first.name, second.name, lines))


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputFileError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise InputFileError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise InputFileError(f"{path}: not a report")
    return document


def _kind_of(path: Path, report: dict[str, Any]) -> str:
    for key, kind in (("features", "ablate"), ("pools", "sweep-kv"), ("throughput", "bench")):
        if key in report:
            return kind
    raise InputFileError(f"{path}: not a report of bench, run, ablate or sweep-kv")


def _differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """What differs between the two beside the numbers: such a comparison may still be what is wanted."""
    named = [name for name in ("workload", "model") if first.get(name) != second.get(name)]
    notes = [f"{name}: {first.get(name)} | {second.get(name)}" for name in named]
    a, b = first.get("settings") or {}, second.get("settings") or {}
    notes += [f"{name}: {a.get(name)} | {b.get(name)}" for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]
    machines = [(report.get("machine") or {}).get("cpu") for report in (first, second)]
    if machines[0] != machines[1]:
        notes.append(f"machine: {machines[0]} | {machines[1]}")
    return notes


def _bench_lines(first: dict[str, Any], second: dict[str, Any]) -> list[Line]:
    def at(*keys: str) -> tuple[float | None, float | None]:
        return _at(first, keys), _at(second, keys)

    spread = "output_tokens_per_s_spread"
    rates = [_at(report, (spread, "median")) or _at(report, ("throughput", "output_tokens_per_s")) for report in (first, second)]
    return [
        Line("output tokens/s", rates[0], rates[1], _spread_of(first), _spread_of(second)),
        Line("tokens/s with prompts", *at("throughput", "total_tokens_per_s")),
        Line("share of the physical limit", *at("limit_fraction")),
        Line("time to first token, median ms", *at("ttft_ms", "p50")),
        Line("time to first token, 99th ms", *at("ttft_ms", "p99")),
        Line("inter-token latency, median ms", *at("itl_ms", "p50")),
        Line("inter-token latency, 99th ms", *at("itl_ms", "p99")),
        Line("prefill seconds", *at("seconds", "prefill")),
        Line("decode seconds", *at("seconds", "decode")),
        Line("sample seconds", *at("seconds", "sample")),
        Line("host ms a step", *at("host_ms_per_step")),
        Line("prefix hit rate", *at("prefix_hit_rate")),
        Line("preemptions", *at("preemptions")),
        Line("peak memory, MB", *at("peak_rss_mb")),
    ]


def _spread_of(report: dict[str, Any]) -> Range | None:
    spread = report.get("output_tokens_per_s_spread") or {}
    return (spread["low"], spread["high"]) if spread.get("runs", 0) > 1 else None


def _ablate_lines(first: dict[str, Any], second: dict[str, Any]) -> list[Line]:
    lines = []
    others = {(entry["name"], entry["concurrency"]): entry for entry in second["features"]}
    for entry in first["features"]:
        other = others.get((entry["name"], entry["concurrency"]))
        if other is not None:
            name = f"{entry['name']} at {entry['concurrency']}"
            lines.append(Line(name, entry["ratio"], other["ratio"], _interval_of(entry), _interval_of(other)))
    rungs = {(rung["name"], rung["concurrency"]): rung for rung in second.get("ladder", [])}
    for rung in first.get("ladder", []):
        if (rung["name"], rung["concurrency"]) in rungs:
            other = rungs[rung["name"], rung["concurrency"]]
            lines.append(
                Line(
                    f"ladder, {rung['name']} at {rung['concurrency']}, tokens/s", rung["output_tokens_per_s"], other["output_tokens_per_s"]
                )
            )
    return lines


def _interval_of(entry: dict[str, Any]) -> Range | None:
    low, high = entry.get("ratio_low"), entry.get("ratio_high")
    return None if low is None or high is None else (low, high)


def _sweep_lines(first: dict[str, Any], second: dict[str, Any]) -> list[Line]:
    lines = []
    others = {(pool["kv_dtype"], pool["tokens"]): pool for pool in second["pools"]}
    for pool in first["pools"]:
        other = others.get((pool["kv_dtype"], pool["tokens"]))
        if other is not None:
            name = f"{pool['tokens']:,} tokens, {pool['kv_dtype']}"
            lines.append(Line(f"{name}: output tokens/s", pool["output_tokens_per_s"], other["output_tokens_per_s"]))
            lines.append(Line(f"{name}: requests completed", pool["completed"], other["completed"]))
    return lines


COMPARISONS: dict[str, Callable[[dict[str, Any], dict[str, Any]], list[Line]]] = {
    "bench": _bench_lines,
    "ablate": _ablate_lines,
    "sweep-kv": _sweep_lines,
}


def _at(report: dict[str, Any], keys: tuple[str, ...]) -> float | None:
    value: Any = report
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) else None


def _table(first: str, second: str, lines: list[Line]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    table.add_column(f"A: {first}", justify="right", overflow="fold")
    table.add_column(f"B: {second}", justify="right", overflow="fold")
    table.add_column("B / A", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for line in lines:
        if line.first is None and line.second is None:
            continue
        shown = [_number(value, span) for value, span in ((line.first, line.first_range), (line.second, line.second_range))]
        table.add_row(line.name, *shown, times(line.ratio) if line.ratio is not None else "", line.verdict)
    return table


def _number(value: float | None, span: Range | None) -> str:
    if value is None:
        return ""
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.3g}"
    return text if span is None else f"{text} ({_number(span[0], None)} to {_number(span[1], None)})"
