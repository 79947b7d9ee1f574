"""`batchinfer plan`: check every row and say what fits, without running anything."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchinfer.cli.flags import EngineFlags, GeneralFlags, InputFlags, ModelFlags, gathers_flags, parse_count
from batchinfer.cli.sampling_flags import SamplingFlags
from batchinfer.cli.settings import engine_config, input_options
from batchinfer.cli.write_json import write_json
from batchinfer.errors import ConfigError

if TYPE_CHECKING:
    from batchinfer.build import ModelHandle
    from batchinfer.config import EngineConfig
    from batchinfer.io.options import InputOptions
    from batchinfer.io.record import InputRow
    from batchinfer.reports.plan import Fit, JobPlan, RowTally


@gathers_flags
def plan(
    input: Annotated[  # noqa: A002
        str | None,
        typer.Argument(
            metavar="INPUT",
            help="Prompts: .jsonl, .csv, .txt (also .gz, .zst), .parquet, .arrow; a folder, a 'pattern*', s3:// and its like, hf://; "
            "- for JSONL on stdin.",
            show_default=False,
        ),
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
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="NAME",
            help="Plan for a GPU that need not be here: h200, h100, a100, l40s, l4, 4090 or b200.",
            rich_help_panel="Plan",
            show_default=False,
        ),
    ] = None,
    output_length: Annotated[
        Any,
        typer.Option(
            "--output-length",
            metavar="N",
            help="Tokens that a row is expected to generate (else: its max_tokens).",
            parser=parse_count,
            rich_help_panel="Plan",
            show_default=False,
        ),
    ] = None,
    model_flags: ModelFlags = ModelFlags(),
    sampling_flags: SamplingFlags = SamplingFlags(),
    engine_flags: EngineFlags = EngineFlags(),
    general: GeneralFlags = GeneralFlags(),
) -> int:
    """Check every row, count tokens, say what fits in memory and how long it will take; nothing is run.

    batchinfer plan prompts.jsonl
    batchinfer plan prompts.jsonl --gpu h200 --concurrency 512

    The time comes from a simulation of the engine with step costs that are measured here in a second or two, once.
    Exit codes: 0 all rows can run, 3 some cannot. `batchinfer run --dry-run` does the same.
    """
    config = engine_config(model_flags, engine_flags, sampling_flags.seed)
    if output_length is not None and output_length < 1:
        raise ConfigError(f"--output-length {output_length}: must be at least 1")
    asked = PlanOptions(gpu, output_length, quiet, json_file)
    return make_plan(config, input_options(input, input_file, input_flags), sampling_flags.checked_values(), asked)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a plan is asked for beside the job itself."""

    gpu: str | None = None
    output_length: int | None = None
    quiet: bool = False
    json_file: Path | None = None


def make_plan(config: EngineConfig, options: InputOptions, sampling: dict[str, Any], asked: PlanOptions) -> int:
    """Plan a job, print the plan on stderr, and return the exit code."""
    from rich.console import Console

    from batchinfer.reports.plan import print_plan
    from batchinfer.reports.summary import PLAIN_WIDTH

    found = _examine(config, options, sampling, asked)
    plain = not sys.stderr.isatty()
    if not asked.quiet:
        console = Console(file=sys.stderr, highlight=False, force_terminal=not plain, no_color=plain, width=PLAIN_WIDTH if plain else None)
        print_plan(found, console)
    tally = found.tally
    print(f"{tally.rows - tally.failed:,} rows can run, {tally.failed:,} cannot", file=sys.stderr)
    write_json(asked.json_file, found.as_dict())
    return found.exit_code


def _examine(config: EngineConfig, options: InputOptions, sampling: dict[str, Any], asked: PlanOptions) -> JobPlan:
    from datetime import datetime

    from batchinfer.build import open_model
    from batchinfer.build_structures import check_job_structure, grammar_shelf, schemas_checked
    from batchinfer.io.results import ResultColumns
    from batchinfer.job.rows_in import RowStream, find_input, open_rows
    from batchinfer.reports.findings import PlanChecks
    from batchinfer.reports.gpus import gpu_named
    from batchinfer.reports.outlook import find_place, look_ahead
    from batchinfer.reports.plan import JobPlan, RowTally, fit_of
    from batchinfer.reports.predict import RowSample

    gpu = None if asked.gpu is None else gpu_named(asked.gpu)
    stream = RowStream.open(find_input(options), options, ResultColumns())
    model = open_model(config)
    rows = open_rows(stream, model, sampling, datetime.now())
    shelf = grammar_shelf(model)
    check_job_structure(rows.defaults, shelf)
    tally = RowTally(model.max_model_len, options.id_column, sample=RowSample(asked.output_length))
    checks = PlanChecks(model.tokenizer, options, rows.chat)

    def see(row: InputRow) -> None:
        tally.see(row)
        checks.see(row)

    tally.count(schemas_checked(checks.watch(rows.prepared(stream.rows(), see), rows.forget), shelf))
    fit = seconds = outlook = None
    if tally.prompt_lengths:
        place = find_place(config, model, tally.lengths(), gpu)
        fit = fit_of(place, tally)
        if not config.fake_model:
            outlook = look_ahead(config, model, place, tally.sample, gpu)
            cached = 0.0 if outlook is None else outlook.prediction.prefix_hit_rate
            seconds = None if gpu is not None else _least_seconds(model, fit, tally, cached)
    notes = [*rows.notes, rows.treatment]
    if shelf.num_compiled:
        notes.append(
            f"structured output: {shelf.num_compiled:,} different schemas, regexes, grammars or lists of choices, each of them tried"
        )
    if rows.parameter_columns:
        notes.append(f"sampling parameters from columns: {', '.join(rows.parameter_columns)}")
    return JobPlan(
        options.input, config.model, rows.chat, tally, fit, seconds, rows.preparer.first_text, outlook, tuple(notes), checks.findings()
    )


def _least_seconds(model: ModelHandle, fit: Fit, tally: RowTally, cached_share: float) -> float:
    from batchinfer.reports.limit import ModelDims
    from batchinfer.reports.plan import least_seconds
    from batchinfer.reports.rates import Arithmetic, machine_rates

    arithmetic = Arithmetic(fit.dtype, fit.quantization, fit.kv_cache_dtype)
    dims = ModelDims.of(model.config, arithmetic, fit.kv_bytes_per_token)
    rates = machine_rates(arithmetic, "cpu" if fit.device == "cpu" else "cuda")
    lengths = tally.lengths()
    return least_seconds(dims, rates, lengths, fit.rows_at_once * lengths.num_answers / len(lengths), cached_share)
