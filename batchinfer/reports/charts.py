"""Charts of the measuring commands' reports, from the same keys that their JSON has. Needs plotly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchinfer.errors import ConfigError
from batchinfer.reports.intervals import times
from batchinfer.reports.wording import plural

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

GAIN, LOSS, UNSURE, PLAIN = "#2a9d8f", "#d1495b", "#8a94a6", "#3d7ea6"  # read well on white and on black
STAGE_COLOURS = (UNSURE, "#c9a227", "#e08e45", "#3d7ea6", "#2a9d8f", "#d1495b", "#b565a7")
SERIES = ("#3d7ea6", "#e08e45", "#2a9d8f", "#b565a7")
STAGES = {
    "start": "start of the process", "load": "load the model", "prefill": "prefill", "decode": "decode",
    "sample": "sample", "host": "schedule and retire", "io": "read and tokenise",
}  # fmt: skip
BAR_PIXELS, FRAME_PIXELS = 30, 110
Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure with what it shows, in a sentence."""

    title: str
    note: str
    figure: Figure


def require_plotly() -> None:
    """Raise `ConfigError`, with the way out, where plotly is not installed: before a measurement, not after it."""
    from importlib.util import find_spec

    if find_spec("plotly") is None:
        raise ConfigError(
            "--html needs plotly, which is not installed: pip install 'batchinfer[html]' (or leave --html out; --json has everything)"
        )


def charts_of(report: Report) -> list[Chart]:
    """The charts of a report of ablate, sweep-kv or bench."""
    for key, draw in CHARTS.items():
        if key in report:
            return draw(report)
    return []


def _ablation_charts(report: Report) -> list[Chart]:
    charts = []
    for concurrency in dict.fromkeys(entry["concurrency"] for entry in report["features"]):
        own = [entry for entry in report["features"] if entry["concurrency"] == concurrency]
        charts.append(_worth(own, concurrency, report.get("confidence_level", 0.95)))
    climbed = dict.fromkeys(rung["concurrency"] for rung in report["ladder"])
    return charts + [_ladder([rung for rung in report["ladder"] if rung["concurrency"] == number], number) for number in climbed]


def _worth(entries: Sequence[Report], concurrency: int, level: float) -> Chart:
    from plotly.graph_objects import Bar, Figure, Scatter

    ordered = sorted(entries, key=lambda entry: float(entry["ratio"]))
    names = [entry["name"] + (" *" if entry.get("measured_on") == "slice" else "") for entry in ordered]
    ratios = [entry["ratio"] for entry in ordered]
    low = [entry["ratio"] if entry["ratio_low"] is None else entry["ratio_low"] for entry in ordered]
    high = [entry["ratio"] if entry["ratio_high"] is None else entry["ratio_high"] for entry in ordered]
    figure = Figure()
    figure.add_trace(
        Bar(
            y=names, x=[ratio - 1 for ratio in ratios], base=1, orientation="h", marker_color=[_colour(entry) for entry in ordered],
            text=[times(ratio) for ratio in ratios], textposition="none", hoverinfo="skip",
        )
    )  # fmt: skip
    figure.add_trace(
        Scatter(
            y=names, x=ratios, mode="markers", marker={"size": 7, "color": [_colour(entry) for entry in ordered]},
            error_x={
                "type": "data", "symmetric": False, "thickness": 1.5, "width": 5,
                "array": [h - r for h, r in zip(high, ratios, strict=True)], "arrayminus": [r - x for r, x in zip(ratios, low, strict=True)],
            },
            hovertext=[_told(entry) for entry in ordered], hoverinfo="text",
        )
    )  # fmt: skip
    figure.add_vline(x=1.0, line_width=1.5, line_dash="dot")
    least, most = min([*low, 0.9]), max([*high, 1.2])
    figure.update_xaxes(
        type="log",
        title="throughput with it over throughput without it",
        tickvals=_ticks(least, most),
        ticktext=[times(v) for v in _ticks(least, most)],
    )
    figure.update_layout(showlegend=False, height=FRAME_PIXELS + BAR_PIXELS * len(ordered), bargap=0.35)
    star = " * measured on a slice: too slow without it for the whole workload." if any(name.endswith("*") for name in names) else ""
    return Chart(
        f"What each feature is worth, {plural(concurrency, 'request')} kept running",
        f"Each against the same engine without it, with the {level:.0%} interval of paired runs. Green gains, red costs, grey cannot be told from 1.00x.{star}",
        figure,
    )


def _colour(entry: Report) -> str:
    if entry["ratio_low"] is None or entry["ratio_low"] <= 1.0 <= entry["ratio_high"]:
        return UNSURE
    return GAIN if entry["ratio"] > 1 else LOSS


def _told(entry: Report) -> str:
    span = "" if entry["ratio_low"] is None else f" ({entry['ratio_low']:.3f} to {entry['ratio_high']:.3f})"
    rates = f"{entry['output_tokens_per_s_on']:,.0f} with it, {entry['output_tokens_per_s_off']:,.0f} without it, output tokens/s"
    return f"<b>{entry['name']}</b> {times(entry['ratio'])}{span}<br>{rates}<br>{entry.get('about', '')}"


def _ticks(low: float, high: float) -> list[float]:
    steps = [0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 5, 7, 10, 20, 50, 100, 200, 500, 1000]
    if high / low > 6:
        steps = [step for step in steps if step not in (0.3, 0.7, 0.8, 0.9, 1.1, 1.2, 7)]
    return [step for step in steps if low * 0.8 <= step <= high * 1.25]


def _ladder(rungs: Sequence[Report], concurrency: int) -> Chart:
    from plotly.graph_objects import Bar, Figure

    ordered = list(reversed(rungs))
    names = [("" if rung["gain"] is None else "+ ") + rung["name"] for rung in ordered]
    figure = Figure(
        Bar(
            y=names, x=[rung["speedup"] for rung in ordered], orientation="h", marker_color=PLAIN,
            text=[f"{times(rung['speedup'])}" + ("" if rung["gain"] is None else f"  (this step {times(rung['gain'])})") for rung in ordered],
            textposition="outside", cliponaxis=False,
            hovertext=[f"{rung['name']}: {rung['output_tokens_per_s']:,.0f} output tokens/s, measured on the {rung['measured_on']}" for rung in ordered],
            hoverinfo="text",
        )
    )  # fmt: skip
    figure.update_xaxes(type="log", title="times the naive loop")
    figure.update_layout(height=FRAME_PIXELS + BAR_PIXELS * len(ordered), bargap=0.35, margin={"r": 190})
    return Chart(
        f"From the naive loop upwards, {plural(concurrency, 'request')} kept running",
        "Each step adds one feature to all above it. The product of the steps' gains, each from paired runs of two neighbours.",
        figure,
    )


def _sweep_charts(report: Report) -> list[Chart]:
    from plotly.graph_objects import Figure, Scatter

    completed, speed = Figure(), Figure()
    for index, name in enumerate(dict.fromkeys(pool["kv_dtype"] for pool in report["pools"])):
        own = sorted((pool for pool in report["pools"] if pool["kv_dtype"] == name), key=lambda pool: int(pool["tokens"]))
        sizes = [pool["bytes"] / 2**20 for pool in own]
        told = [f"{pool['tokens']:,} tokens {name}: {pool['completed']:,} of {pool['requests']:,} completed, {pool['peak_running']:,} at once, "
                f"{pool['preemptions']:,} preemptions" for pool in own]  # fmt: skip
        line = {"color": SERIES[index % len(SERIES)], "width": 2.5}
        for figure, key in ((completed, "completed"), (speed, "output_tokens_per_s")):
            figure.add_trace(
                Scatter(
                    x=sizes, y=[pool[key] for pool in own], name=f"{name} keys and values", mode="lines+markers", line=line, marker={"size": 9},
                    hovertext=told, hoverinfo="text",
                )
            )  # fmt: skip
    first = report["pools"][0] if report["pools"] else None
    ticks = sorted(
        {
            round(pool["bytes"] / 2**20, 3): f"{pool['bytes'] / 2**20:,.0f} MiB<br>{pool['tokens']:,}" for pool in reversed(report["pools"])
        }.items()
    )
    for figure, title in ((completed, "requests completed"), (speed, "output tokens/s")):
        figure.update_xaxes(
            type="log",
            title="size of the KV pool: bytes, and tokens in the first format",
            tickvals=[at for at, _ in ticks],
            ticktext=[text for _, text in ticks],
        )
        figure.update_yaxes(title=title, rangemode="tozero")
        figure.update_layout(height=380, showlegend=len(figure.data) > 1)
    if first is not None:
        completed.add_hline(y=first["requests"], line_width=1.5, line_dash="dot")
    return [
        Chart(
            "Requests completed",
            f"Within the {report['step_budget']:,} steps that the largest pool took; the dotted line is all of them.",
            completed,
        ),
        Chart("Throughput", "Output tokens a second, those of unfinished requests included.", speed),
    ]


def _bench_charts(report: Report) -> list[Chart]:
    from plotly.graph_objects import Bar, Figure, Scatter

    seconds = report["seconds"]
    split = Figure()
    for index, (stage, name) in enumerate(STAGES.items()):
        if seconds.get(stage, 0) > 0:
            split.add_trace(
                Bar(
                    y=[""],
                    x=[seconds[stage]],
                    name=name,
                    orientation="h",
                    marker_color=STAGE_COLOURS[index],
                    hovertemplate="%{x:.2f} s",
                )
            )
    split.update_xaxes(title="seconds")
    split.update_layout(barmode="stack", height=230, legend={"orientation": "h", "y": -0.6, "traceorder": "normal"})
    charts = [Chart("Where the time went", f"{seconds['wall']:.1f} s from the start of the process to the end of the run.", split)]
    runs = report.get("repeats", [])
    if len(runs) > 1:
        rates = [run["output_tokens_per_s"] for run in runs]
        figure = Figure(Scatter(x=list(range(1, len(runs) + 1)), y=rates, mode="markers", marker={"size": 11, "color": PLAIN}))
        figure.update_xaxes(title="run", dtick=1)
        figure.update_yaxes(title="output tokens/s", rangemode="tozero")
        figure.update_layout(height=300)
        charts.append(Chart("Runs", "The same work, repeated.", figure))
    return charts


CHARTS: dict[str, Callable[[Report], list[Chart]]] = {"features": _ablation_charts, "pools": _sweep_charts, "throughput": _bench_charts}
