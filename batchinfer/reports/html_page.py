"""`--html FILE`: a report as one page that needs nothing else, charts included, in light and dark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from batchinfer.errors import OutputError
from batchinfer.reports.charts import Chart, charts_of
from batchinfer.reports.intervals import times

STYLE = """
:root { --bg: #ffffff; --fg: #1c2430; --dim: #5b6675; --grid: #dde2ea; --card: #f6f8fb; color-scheme: light; }
:root[data-theme="dark"] { --bg: #12161c; --fg: #e6eaf0; --dim: #9aa5b4; --grid: #2c3542; --card: #1a2029; color-scheme: dark; }
body { background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1000px; padding: 24px 16px 64px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 18px; margin: 40px 0 4px; }
p { margin: 4px 0; } .dim { color: var(--dim); } code { overflow-wrap: anywhere; }
.numbers { overflow-x: auto; } table { border-collapse: collapse; margin-top: 8px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 12px 4px 0; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th { color: var(--dim); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
td.why { text-align: left; white-space: normal; min-width: 18em; }
button { float: right; background: var(--card); color: var(--fg); border: 1px solid var(--grid); border-radius: 6px; padding: 4px 10px; cursor: pointer; }
details { margin-top: 40px; } pre { background: var(--card); padding: 12px; overflow-x: auto; border-radius: 6px; font-size: 12px; }
"""

SCRIPT = """
const root = document.documentElement, prefers = matchMedia("(prefers-color-scheme: dark)");
const colour = name => getComputedStyle(root).getPropertyValue(name).trim();
function axes(layout, change) { for (const key of ["xaxis", "yaxis"]) change(layout[key] = layout[key] || {}); }
function draw() {
  charts.forEach((chart, index) => {
    const layout = structuredClone(chart.layout);
    layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.font = { color: colour("--fg"), family: "system-ui, sans-serif", size: 13 };
    layout.margin = Object.assign({ l: 10, r: 20, t: 10, b: 50 }, layout.margin);
    axes(layout, axis => { axis.gridcolor = axis.zerolinecolor = colour("--grid"); axis.automargin = true; });
    (layout.shapes || []).forEach(shape => { shape.line.color = colour("--dim"); });
    const data = structuredClone(chart.data);
    data.forEach(trace => { if (trace.error_x) trace.error_x.color = colour("--fg"); });
    Plotly.react("chart" + index, data, layout, { responsive: true, displayModeBar: false });
  });
}
function paint(dark) { root.dataset.theme = dark ? "dark" : "light"; draw(); }
prefers.addEventListener("change", event => paint(event.matches));
document.getElementById("theme").addEventListener("click", () => paint(root.dataset.theme !== "dark"));
paint(prefers.matches);
"""


def write_html(path: Path | None, title: str, report: Mapping[str, Any]) -> None:
    """Write a report as a page; None is nowhere."""
    if path is None:
        return
    try:
        path.write_text(html_page(title, report), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--html {path}: {error.strerror or error}") from None


def html_page(title: str, report: Mapping[str, Any]) -> str:
    """The page: what was measured on what, charts, numbers, and the whole report as JSON."""
    from plotly.offline import get_plotlyjs

    charts = charts_of(report)
    figures = ",\n".join(chart.figure.to_json() for chart in _plain(charts)).replace("</", "<\\/")
    body = [f"<h1>{escape(title)} <button id='theme'>light / dark</button></h1>", *_head(report)]
    for index, chart in enumerate(charts):
        body.append(f"<h2>{escape(chart.title)}</h2><p class='dim'>{escape(chart.note)}</p><div id='chart{index}'></div>")
    body.append(_numbers(report))
    whole = escape(json.dumps(report, indent=1, ensure_ascii=False))
    body.append(f"<details><summary>Everything, as JSON</summary><pre>{whole}</pre></details>")
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>\n" + "\n".join(body) + f"\n<script>{get_plotlyjs()}</script>\n"
        f"<script>const charts = [{figures}];{SCRIPT}</script></body></html>\n"
    )


def _plain(charts: Sequence[Chart]) -> Sequence[Chart]:
    """Without the library's own look: the page has one for light and one for dark."""
    for chart in charts:
        chart.figure.update_layout(template="none")
    return charts


def _head(report: Mapping[str, Any]) -> list[str]:
    machine = report.get("machine") or {}
    lines = [
        f"{machine.get('cpu', '')}, {machine.get('cores', '?')} cores, {machine.get('memory_gib', '?')} GiB; model {report.get('model', '')}; "
        f"{report.get('workload', '')}",
        *report.get("choices", [])[:12],
    ]
    parts = [f"<p class='dim'>{escape(str(line))}</p>" for line in lines if line]
    if report.get("interrupted"):
        parts.append("<p><b>Stopped early: the numbers are of what was measured until then.</b></p>")
    parts.append(f"<p><code>{escape(' '.join(map(str, report.get('command', []))))}</code></p>")
    return parts


def _numbers(report: Mapping[str, Any]) -> str:
    if "features" in report:
        rows = [
            [
                entry["name"], entry["concurrency"], times(entry["ratio"]), _span(entry), f"{entry['output_tokens_per_s_on']:,.0f}",
                f"{entry['output_tokens_per_s_off']:,.0f}", _waits(entry["ttft_ms"]), _waits(entry["itl_ms"]), f"{entry['peak_blocks']:,}",
                _share(entry["token_agreement"]), entry["why"],
            ]
            for entry in report["features"]
        ]  # fmt: skip
        heads = [
            "feature",
            "at once",
            "worth",
            "interval",
            "tokens/s with",
            "without",
            "first token, ms",
            "next token, ms",
            "peak blocks",
            "same text",
            "",
        ]
        return _table(heads, rows)
    if "pools" in report:
        rows = [
            [
                f"{pool['tokens']:,}", f"{pool['blocks']:,}", pool["kv_dtype"], f"{pool['completed']:,} of {pool['requests']:,}",
                f"{pool['output_tokens_per_s']:,.0f}", f"{pool['preemptions']:,}", f"{pool['recomputed_tokens']:,}", pool["peak_running"],
                f"{pool['prefix_hit_rate']:.0%}", _share(pool.get("token_agreement")), pool["note"],
            ]
            for pool in report["pools"]
        ]  # fmt: skip
        heads = [
            "pool tokens",
            "blocks",
            "KV",
            "completed",
            "tokens/s",
            "preemptions",
            "recomputed",
            "most running",
            "prefix hits",
            "same text",
            "",
        ]
        return _table(heads, rows)
    rows = [[name, value] for name, value in _bench_numbers(report)]
    return _table(["", ""], rows)


def _bench_numbers(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    limit, throughput = report.get("limit") or {}, report["throughput"]
    shown = [
        ("output tokens/s", f"{throughput['output_tokens_per_s']:,.1f}"),
        ("tokens/s with prompts", f"{throughput['total_tokens_per_s']:,.1f}"),
        ("share of the physical limit", _share(limit.get("fraction"))),
        ("MFU", _share(limit.get("mfu"))),
        ("MBU", _share(limit.get("mbu"))),
        ("time to first token, ms, median / 99th", _waits(report.get("ttft_ms"))),
        ("inter-token latency, ms, median / 99th", _waits(report.get("itl_ms"))),
        ("prefix hits", _share(report.get("prefix_hit_rate"))),
        ("preemptions", f"{report.get('preemptions', 0):,}"),
        ("peak memory, MB", f"{report.get('peak_rss_mb', 0):,.0f}"),
    ]
    return [(name, value) for name, value in shown if value]


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>" + "".join(_cell(value, index == len(row) - 1 and len(row) > 2) for index, value in enumerate(row)) + "</tr>" for row in rows
    )
    return f"<h2>Numbers</h2><div class='numbers'><table><tr>{head}</tr>{body}</table></div>"


def _cell(value: object, is_why: bool) -> str:
    return f"<td{' class=why' if is_why else ''}>{escape(str(value))}</td>"


def _span(entry: Mapping[str, Any]) -> str:
    return "one round" if entry["ratio_low"] is None else f"{entry['ratio_low']:.2f} to {entry['ratio_high']:.2f}"


def _waits(waits: Mapping[str, float] | None) -> str:
    return "" if waits is None else f"{waits['p50']:,.1f} / {waits['p99']:,.1f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
