"""`batchinfer plan`: check every row and say what fits, without running anything."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchinfer.cli.flags import EngineFlags, GeneralFlags, InputFlags, ModelFlags, SamplingFlags, gathers_flags
from batchinfer.cli.settings import engine_config, input_options
from batchinfer.cli.write_json import write_json

if TYPE_CHECKING:
    from batchinfer.config import EngineConfig
    from batchinfer.io.options import InputOptions
    from batchinfer.reports.plan import JobPlan


@gathers_flags
def plan(
    input: Annotated[  # noqa: A002
        str | None, typer.Argument(metavar="INPUT", help="Prompts: .jsonl, .parquet or .txt; - for JSONL on stdin.", show_default=False)
    ] = None,
    input_file: Annotated[str | None, typer.Option("-i", "--input-file", hidden=True)] = None,
    input_flags: InputFlags = InputFlags(),
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the plan as JSON.", rich_help_panel="Output", show_default=False)
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option("-q", "--quiet", metavar=" ", help="Print only the last line: N rows can run, M cannot.", rich_help_panel="Output"),
    ] = False,
    model_flags: ModelFlags = ModelFlags(),
    sampling_flags: SamplingFlags = SamplingFlags(),
    engine_flags: EngineFlags = EngineFlags(),
    general: GeneralFlags = GeneralFlags(),
) -> int:
    """Check every row, count tokens and say what fits in memory; nothing is run.

    batchinfer plan prompts.jsonl

    Exit codes: 0 all rows can run, 3 some cannot. `batchinfer run --dry-run` does the same.
    """
    config = engine_config(model_flags, engine_flags, sampling_flags.seed)
    return make_plan(config, input_options(input, input_file, input_flags), sampling_flags.checked_values(), quiet, json_file)


def make_plan(config: EngineConfig, options: InputOptions, sampling: dict[str, Any], quiet: bool, json_file: Path | None = None) -> int:
    """Plan a job, print the plan on stderr, and return the exit code."""
    from rich.console import Console

    from batchinfer.reports.plan import print_plan
    from batchinfer.reports.summary import PLAIN_WIDTH

    found = _examine(config, options, sampling)
    plain = not sys.stderr.isatty()
    if not quiet:
        console = Console(file=sys.stderr, highlight=False, force_terminal=not plain, no_color=plain, width=PLAIN_WIDTH if plain else None)
        print_plan(found, console)
    tally = found.tally
    print(f"{tally.rows - tally.failed:,} rows can run, {tally.failed:,} cannot", file=sys.stderr)
    write_json(json_file, found.as_dict())
    return found.exit_code


def _examine(config: EngineConfig, options: InputOptions, sampling: dict[str, Any]) -> JobPlan:
    """Read, render and tokenise every row, as the job would."""
    from datetime import datetime

    from batchinfer.build import open_model
    from batchinfer.io.results import ResultColumns
    from batchinfer.io.source import find_files
    from batchinfer.job.rows_in import RowStream, open_rows
    from batchinfer.reports.limit import ModelDims
    from batchinfer.reports.plan import JobPlan, RowTally, judge_fit, least_seconds
    from batchinfer.reports.rates import Arithmetic, machine_rates

    stream = RowStream.open(find_files(options.input), options, ResultColumns())
    model = open_model(config)
    rows = open_rows(stream, model, sampling, datetime.now())
    tally = RowTally(model.max_model_len, options.id_column)
    tally.count(rows.prepared(stream.rows(), tally.see))
    fit = judge_fit(config, model, tally)
    seconds = None
    if fit is not None and not config.fake_model:
        arithmetic = Arithmetic(fit.dtype, fit.quantization, fit.kv_cache_dtype)
        dims = ModelDims.of(model.config, arithmetic, fit.kv_bytes_per_token)
        rates = machine_rates(arithmetic, "cpu" if fit.device == "cpu" else "cuda")
        seconds = least_seconds(dims, rates, (tally.prompt_lengths, tally.output_limits), fit.rows_at_once)
    notes = [*rows.notes, rows.treatment]
    if rows.parameter_columns:
        notes.append(f"sampling parameters from columns: {', '.join(rows.parameter_columns)}")
    return JobPlan(options.input, config.model, rows.chat, tally, fit, seconds, rows.preparer.first_text, tuple(notes))
