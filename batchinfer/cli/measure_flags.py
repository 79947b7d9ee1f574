"""Flags that the measuring commands share: what to measure with, and where the report goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchinfer.cli.flags import parse_count
from batchinfer.errors import ConfigError

if TYPE_CHECKING:
    from batchinfer.build import ModelHandle
    from batchinfer.reports.measuring_face import MeasuringFace
    from batchinfer.reports.workload import Workload

MIX_NAMES = ("chat", "shared-prefix", "long-prompt", "short-answer", "repetitive")


@dataclass(frozen=True)
class WorkloadFlags:
    """What to measure with."""

    workload: Annotated[
        Path | None,
        typer.Option(
            "--workload",
            metavar="FILE",
            help="Your own prompts: any input of `batchinfer run`, with sampling parameters as columns (else: a synthetic mix).",
            rich_help_panel="Workload",
            show_default=False,
        ),
    ] = None
    mix: Annotated[
        str | None,
        typer.Option(
            "--mix",
            metavar="NAME",
            help=f"Synthetic mix: {', '.join(MIX_NAMES)} (chat).",
            rich_help_panel="Workload",
            show_default=False,
        ),
    ] = None
    rows: Annotated[
        int | None,
        typer.Option(
            "--rows",
            "--limit",
            metavar="N",
            help="Rows to measure with (else: chosen, or the whole file).",
            parser=parse_count,
            rich_help_panel="Workload",
            show_default=False,
        ),
    ] = None
    seed: Annotated[
        int,
        typer.Option(
            "--seed", metavar="N", help="Seed of the synthetic mix and of the job (0).", rich_help_panel="Workload", show_default=False
        ),
    ] = 0

    def check(self) -> None:
        """Raise `ConfigError` for what cannot be meant."""
        if self.rows is not None and self.rows < 1:
            raise ConfigError(f"--rows {self.rows}: must be at least 1")
        if self.mix is not None and self.mix not in MIX_NAMES:
            raise ConfigError(f"--mix {self.mix}: must be one of {', '.join(MIX_NAMES)}")
        if self.mix is not None and self.workload is not None:
            raise ConfigError("--mix and --workload both say what to measure with; give one of them")

    def load(self, model: ModelHandle, face: MeasuringFace, default_rows: int | None = None) -> Workload:
        """The workload; rows of a file that cannot run are left out and said. `default_rows` is for a synthetic mix."""
        from batchinfer.reports.mixes import make_mix
        from batchinfer.reports.wording import plural
        from batchinfer.reports.workload import read_workload

        if self.workload is None:
            return make_mix(self.mix or "chat", model.tokenizer, self.rows or default_rows, self.seed, model.max_model_len)
        found = read_workload(self.workload, model, self.rows)
        if found.left_out:
            are = "is" if found.left_out == 1 else "are"
            rows = plural(found.left_out, "row")
            face.warn(f"{rows} of {self.workload} cannot run and {are} left out; the first: {found.first_error}")
        return found.workload


@dataclass(frozen=True)
class ReportFlags:
    """Where the report goes beside the terminal."""

    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write everything as JSON; - is stdout.", rich_help_panel="Output", show_default=False),
    ] = None
    html_file: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Write one page with charts, complete in itself.", rich_help_panel="Output", show_default=False
        ),
    ] = None
    quiet: Annotated[
        bool,
        typer.Option(
            "-q", "--quiet", metavar=" ", help="No progress on stderr; the report at the end is printed.", rich_help_panel="Output"
        ),
    ] = False

    def check(self) -> None:
        """Raise `ConfigError` for a report that could not be written once everything is measured."""
        if self.html_file is not None:
            from batchinfer.reports.charts import require_plotly

            require_plotly()

    def write(self, title: str, report: dict[str, Any]) -> None:
        """Write the files that were asked for."""
        from batchinfer.cli.write_json import write_json
        from batchinfer.reports.html_page import write_html

        write_json(self.json_file, report)
        write_html(self.html_file, title, report)
