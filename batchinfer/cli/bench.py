"""`batchinfer bench`: throughput and latency of one configuration on one workload, or the host's cost of a step."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchinfer.cli.flags import EngineFlags, GeneralFlags, ModelFlags, gathers_flags
from batchinfer.cli.measure_flags import ReportFlags, WorkloadFlags
from batchinfer.cli.settings import engine_config
from batchinfer.cli.write_json import write_json
from batchinfer.errors import ConfigError

if TYPE_CHECKING:
    from batchinfer.config import EngineConfig
    from batchinfer.engine import Engine
    from batchinfer.reports.limit import LimitMeter
    from batchinfer.reports.measuring_face import MeasuringFace
    from batchinfer.reports.workload import Workload

HOST_COST_FROM = 64  # rows at once below which the churn scenario says nothing


@gathers_flags
def bench(
    workload_flags: WorkloadFlags = WorkloadFlags(),
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="N", help="Runs to take the median of (1).", rich_help_panel="Workload", show_default=False)
    ] = 1,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            "--compare",
            metavar="A.json B.json",
            help="Measure nothing: compare two reports that bench, ablate or sweep-kv wrote with --json.",
            rich_help_panel="Output",
            show_default=False,
        ),
    ] = None,
    report_flags: ReportFlags = ReportFlags(),
    model_flags: ModelFlags = ModelFlags(),
    engine_flags: EngineFlags = EngineFlags(),
    general: GeneralFlags = GeneralFlags(),
) -> int:
    """Measure throughput and latency on one workload, beside the physical limit of this machine.

    batchinfer bench --rows 16

    batchinfer bench --mix shared-prefix --repeats 3 --json a.json

    batchinfer bench --workload prompts.jsonl --concurrency 64 --json b.json

    batchinfer bench --compare a.json b.json

    All rows are waiting at the start, as in an offline job; --concurrency N keeps at most N of them running. Ctrl-C ends
    it early and reports what was measured until then.
    """
    if compare is not None:
        return _compare(*compare)
    workload_flags.check()
    report_flags.check()
    if repeats < 1:
        raise ConfigError(f"--repeats {repeats}: must be at least 1")
    config = engine_config(model_flags, engine_flags, workload_flags.seed)
    if config.fake_model and config.max_num_seqs is not None and workload_flags.workload is None and workload_flags.mix is None:
        return _host_cost(config, report_flags.json_file)
    return _throughput(config, workload_flags, repeats, report_flags)


def _throughput(config: EngineConfig, flags: WorkloadFlags, repeats: int, out: ReportFlags) -> int:
    from batchinfer.build import JobNeed, WeightShelf, open_model
    from batchinfer.machine import process_age_s
    from batchinfer.reports.bench import Before, Repeats, finish_seconds, run_workload
    from batchinfer.reports.measuring_face import MeasuringFace
    from batchinfer.reports.metering import RunMeter
    from batchinfer.reports.summary import print_end
    from batchinfer.reports.wording import kernels_folded

    start, began = process_age_s(), time.perf_counter()
    model = open_model(config)
    opened = time.perf_counter()
    shelf, runs = WeightShelf(), Repeats()
    with MeasuringFace(out.quiet, sys.stderr) as face:
        load = flags.load(model, face)
        io_seconds = time.perf_counter() - opened
        need = JobNeed(pool_tokens=load.prompt_tokens + load.most_output_tokens)
        for repeat in range(repeats):
            meter = RunMeter(measure_again=not repeat, shelf=shelf)
            engine = meter.build_engine(config, model, need)
            engine.on_step = meter.step
            if not repeat:
                before = Before(start, (opened - began) + meter.load_seconds, io_seconds)
                for line in [*_size(load, engine, meter.meter), *kernels_folded(engine.choices)]:
                    face.say(line)
            run = run_workload(engine, load, _ticker(face, len(load.requests), f"run {repeat + 1} of {repeats}: " if repeats > 1 else ""))
            run.report.model = config.model
            finish_seconds(run.report, before)
            runs.add(run, meter.summary(run.report))
            if run.report.interrupted:
                break
    run, summary = runs.median
    print_end(summary, sys.stderr, quiet=False)
    for line in runs.lines():
        print(line, file=sys.stderr)
    document = {**summary.as_dict(), **run.extra_keys(), **runs.as_dict(), "workload": load.name, "command": sys.argv, "seed": flags.seed}
    out.write("Throughput and latency", document)
    return runs.exit_code


def _ticker(face: MeasuringFace, rows: int, before: str) -> Any:
    """Tells the face about each step."""

    def tick(engine: Engine, done: int, seconds: float) -> None:
        stats = engine.stats
        face.progress(
            f"{before}[{seconds:.0f} s] rows {done:,}/{rows:,} done, {stats.running:,} running, {stats.waiting:,} waiting; "
            f"{stats.output_tokens / max(seconds, 1e-9):,.0f} output tokens/s"
        )

    return tick


def _size(load: Workload, engine: Engine, meter: LimitMeter | None) -> list[str]:
    """What there is to do, and the time that it takes at least."""
    from batchinfer.reports.lengths import RowLengths
    from batchinfer.reports.plan import least_seconds
    from batchinfer.reports.wording import in_words

    lines = [f"workload: {load.described()}"]
    if meter is not None:
        lengths, limits = RowLengths.of(load.requests), engine.limits
        fitting = limits.pool_tokens * lengths.num_answers // max(1, int(lengths.held(shared=True).sum()))
        least = least_seconds(meter.dims, meter.rates, lengths, min(lengths.num_answers, limits.max_num_seqs, max(1, fitting)))
        lines.append(
            f"time: {in_words(least)} at the machine's physical limit, a few times that as a rule; --rows N takes fewer, Ctrl-C ends early"
        )
    return lines


def _compare(first: Path, second: Path) -> int:
    from batchinfer.reports.compare import compare_files
    from batchinfer.reports.summary import report_console

    report_console(sys.stdout).print(compare_files(first, second))
    return 0


def _host_cost(config: EngineConfig, json_file: Path | None) -> int:
    """The scenario that host-cost targets are stated for; pool and token budget follow from the concurrency unless given."""
    from dataclasses import replace

    from batchinfer.build import build_engine, open_model
    from batchinfer.machine import read_machine, read_versions
    from batchinfer.reports.host_cost import BUDGET_PER_ROW, measure_host_cost, pool_tokens_for

    concurrency = config.max_num_seqs or HOST_COST_FROM
    if concurrency < HOST_COST_FROM:
        raise ConfigError(f"--concurrency {concurrency}: the host-cost scenario needs at least {HOST_COST_FROM} rows at once")
    block = config.block_size or 32
    blocks = config.num_kv_blocks or (None if config.kv_cache_memory else pool_tokens_for(concurrency) // block)
    budget = config.max_num_batched_tokens or BUDGET_PER_ROW * concurrency
    config = replace(config, num_kv_blocks=blocks, max_num_batched_tokens=budget)
    model = open_model(config)
    cost = measure_host_cost(lambda: build_engine(config, model), model.tokenizer.vocabulary, concurrency, config.seed)
    for line in cost.lines():
        print(line, file=sys.stderr)
    write_json(
        json_file,
        {
            "host_cost": cost.as_dict(),
            "host_ms_per_step": cost.as_dict()["steady_ms"],
            "versions": read_versions(),
            "machine": read_machine().as_dict(),
        },
    )
    return 0
