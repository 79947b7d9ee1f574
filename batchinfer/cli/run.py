"""`batchinfer run`: the main job."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from batchinfer.cli.flags import EngineFlags, GeneralFlags, InputFlags, ModelFlags, OutputFlags, gathers_flags
from batchinfer.cli.sampling_flags import SamplingFlags
from batchinfer.cli.settings import engine_config, input_options, output_options


@gathers_flags
def run(
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
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", metavar=" ", help="Check every row and say what fits, without running (as plan does).", rich_help_panel="Input"
        ),
    ] = False,
    hang_timeout: Annotated[float, typer.Option("--hang-timeout", metavar="SECONDS", hidden=True, min=0.1)] = 600.0,
    input_flags: InputFlags = InputFlags(),
    output_flags: OutputFlags = OutputFlags(),
    model_flags: ModelFlags = ModelFlags(),
    sampling_flags: SamplingFlags = SamplingFlags(),
    engine_flags: EngineFlags = EngineFlags(),
    general: GeneralFlags = GeneralFlags(),
) -> int:
    """Read prompts, generate, write results in input order.

    batchinfer run prompts.jsonl
    batchinfer run prompts.parquet -o answers.parquet --max-tokens 256
    batchinfer run 'data/**/*.csv.gz' --prompt-column text -o s3://bucket/answers.jsonl

    Exit codes: 0 all rows fine, 1 could not do the job, 2 wrong usage or settings, 3 finished and some rows failed, 130 interrupted.
    """
    from batchinfer.stopwatch import choose_stopwatch

    with choose_stopwatch(output_flags.timings) as watch:
        config = engine_config(model_flags, engine_flags, sampling_flags.seed)
        options = input_options(input, input_file, input_flags)
        sampling = sampling_flags.checked_values()
        if dry_run:
            from batchinfer.cli.plan import PlanOptions, make_plan

            return make_plan(config, options, sampling, PlanOptions(quiet=output_flags.quiet))
        outputs = output_options(output_flags)

        from batchinfer.job import JobParts, run_job
        from batchinfer.reports.faces import choose_face
        from batchinfer.reports.metering import RunMeter

        meter = RunMeter(watch=watch)
        with choose_face(output_flags.quiet, sys.stderr) as face:
            face.on_step = meter.step
            parts = JobParts(
                open_model=meter.open_model,
                build_engine=meter.build_engine,
                report_json=meter.report_json,
                leave=face.close,
                hang_s=hang_timeout,
                watch=watch,
            )
            report = run_job(config, options, outputs, sampling, face, parts)

        from batchinfer.reports.summary import print_end  # draws tables: not needed before

        print_end(meter.summary(report), sys.stderr, output_flags.quiet)
        return report.exit_code
