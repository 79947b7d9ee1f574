"""The sweep over KV pools as a table."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from batchinfer.reports.sweep import PoolResult, SweepReport

BAR_CELLS = 12


def sweep_picture(report: SweepReport) -> RenderableType:
    """One row a pool, smallest first, with what the numbers mean above and below."""
    if not report.results:
        return Text("no pool was measured")
    several = len(report.kv_dtypes) > 1
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", collapse_padding=True)
    for name in ("pool\ntokens", "\nblocks", *(("\nKV",) if several else ()), "\ncompleted"):
        table.add_column(name, justify="left" if name == "\nKV" else "right", no_wrap=True)
    table.add_column("", no_wrap=True, width=BAR_CELLS)
    for name in ("output\ntokens/s", "preemp-\ntions", "recom-\nputed", "most\nrunning", "prefix\nhits"):
        table.add_column(name, justify="right", no_wrap=True)
    if several:
        table.add_column("same as\nreference", justify="right", no_wrap=True)
    notes: list[Text] = []
    for name in report.kv_dtypes:
        for result in report.of_dtype(name):
            table.add_row(*_cells(report, result, several))
            if result.note:
                notes.append(Text(f"{result.pool.tokens:,} tokens {name}: {result.note}", style="yellow"))
        table.add_section()
    first = report.results[0]
    head = [
        Text(report.provenance.line()),
        Text(f"completed: requests of {first.requests:,} within the {report.step_budget:,} steps that the largest pool took"),
    ]
    parts: list[RenderableType] = [*head, Text(), table, Text(), *notes, *(Text(line) for line in _verdicts(report))]
    if report.interrupted:
        parts.append(Text("stopped early: the pools above are those that were measured", style="yellow"))
    return Group(*parts)


def _cells(report: SweepReport, result: PoolResult, several: bool) -> list[RenderableType]:
    complete = report.smallest_complete(result.pool.kv_dtype)
    share = result.completed / max(1, result.requests)
    all_done = result.completed == result.requests
    style = "green" if all_done else "yellow"
    mark = " ◂" if complete is not None and result.pool == complete.pool else ""
    bar = Text("█" * max(1 if result.completed else 0, round(share * (BAR_CELLS - 2))) + mark, style=style)
    cells: list[RenderableType] = [f"{result.pool.tokens:,}", f"{result.pool.blocks:,}"]
    cells += [result.pool.kv_dtype] if several else []
    cells += [Text(f"{result.completed:,}", style=style), bar, f"{result.output_tokens_per_s:,.0f}", f"{result.preemptions:,}"]
    cells += [f"{result.recomputed_tokens:,}", f"{result.peak_running:,}", f"{result.prefix_hit_rate:.0%}"]
    if several:
        share_same = result.agreement.share if result.agreement is not None else None
        cells.append("" if share_same is None else f"{share_same:.0%}")
    return cells


def _verdicts(report: SweepReport) -> list[str]:
    lines = []
    several = len(report.kv_dtypes) > 1
    for name in report.kv_dtypes:
        found, results = report.smallest_complete(name), report.of_dtype(name)
        of = f" with {name} keys and values" if several else ""
        if found is None:
            lines.append(f"no pool of these completes all requests{of}")
            continue
        lines.append(
            f"◂ smallest of these pools that completes all requests{of}: {found.pool.tokens:,} tokens, {found.pool.blocks:,} blocks"
        )
        short = [result for result in results if result.pool.tokens < found.pool.tokens]
        if short:
            lines.append(f"  requests stop fitting at {short[-1].pool.tokens:,} tokens: {short[-1].completed:,} of {short[-1].requests:,}")
    if several:
        lines.append(
            f"same as reference: tokens before their row's first difference from the largest {report.kv_dtypes[0]} pool; pools of a rank have equal bytes"
        )
    return lines
