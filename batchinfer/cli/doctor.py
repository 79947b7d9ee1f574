"""`batchinfer doctor`: what this machine offers and what was made of it."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from batchinfer.cli.flags import GeneralFlags, gathers_flags, parse_count


@gathers_flags
def doctor(
    threads: Annotated[
        Any, typer.Option("--threads", metavar="N", help="CPU threads to look at the machine with.", parser=parse_count, show_default=False)
    ] = None,
    general: GeneralFlags = GeneralFlags(),
) -> int:
    """Show devices, processor features, memory, which kernel was chosen for each operation and why, and the caches.

    Exit code 1 when something stands in the way of running a model.
    """
    from batchinfer.config import EngineConfig
    from batchinfer.reports.doctor import examine

    EngineConfig(threads=threads)  # refuses a number of threads that no machine has
    findings = examine(threads)
    for section in findings.sections:
        print(section.title)
        for name, text in section.lines:
            print(f"  {name:<18}{text}" if name else f"  {text}")
        print()
    for problem in findings.problems:
        print(f"PROBLEM: {problem}")
    print("no problems found" if not findings.problems else f"{len(findings.problems)} problem(s) found")
    sys.stdout.flush()
    return 1 if findings.fatal else 0
