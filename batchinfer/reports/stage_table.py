"""The table of `--timings`: when each stage of a run began and what it took."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from batchinfer.stopwatch import StageTime

LEAST_S = 0.001  # shorter stages stand together in one line


def stage_table(stages: Sequence[StageTime]) -> Table:
    """Two blocks, the start up to the end of the first step and what came after it, each with its sum."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("stage")
    for name in ("from ms", "took ms", "of all"):
        table.add_column(name, justify="right", style="dim" if name == "from ms" else "")
    table.add_column()
    total = sum(stage.seconds for stage in stages)
    for is_startup, title in ((True, "start, up to the end of the first step"), (False, "after it")):
        block = [stage for stage in stages if stage.startup is is_startup]
        if not block:
            continue
        table.add_row(Text(title, style="bold"), "", *_amount(block, total))
        for stage in block:
            if stage.seconds >= LEAST_S:
                table.add_row("  " + stage.name, f"{1e3 * stage.began:,.0f}", *_amount([stage], total), stage.detail)
        short = [stage for stage in block if stage.seconds < LEAST_S]
        if short:
            table.add_row(f"  {len(short)} shorter", "", *_amount(short, total))
    return table


def _amount(stages: Sequence[StageTime], total: float) -> tuple[str, str]:
    seconds = sum(stage.seconds for stage in stages)
    return f"{1e3 * seconds:,.0f}", f"{seconds / total:.1%}" if total else ""
