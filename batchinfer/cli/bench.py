"""`batchinfer bench`: throughput of one configuration on one workload, or the host's cost of a step."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchinfer.cli.flags import EngineFlags, GeneralFlags, ModelFlags, gathers_flags, parse_count
from batchinfer.cli.settings import engine_config
from batchinfer.cli.write_json import write_json
from batchinfer.errors import ConfigError

if TYPE_CHECKING:
    from batchinfer.config import EngineConfig
    from batchinfer.engine import Engine
    from batchinfer.reports.limit import LimitMeter
    from batchinfer.reports.workload import Workload

PROGRESS_SECONDS = 10.0
HOST_COST_FROM = 64  # rows at once below which the churn scenario says nothing


@gathers_flags
def bench(
    workload: Annotated[
        Path | None,
        typer.Option(
            "--workload",
            metavar="FILE",
            help="JSONL rows with prompt, messages or prompt_token_ids and sampling parameters (else: a synthetic chat mix).",
            rich_help_panel="Workload",
            show_default=False,
        ),
    ] = None,
    rows: Annotated[
        Any,
        typer.Option(
            "--rows",
            "--limit",
            metavar="N",
            help="Rows to run, fewer for a quick look (128, or the whole file).",
            parser=parse_count,
            rich_help_panel="Workload",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Seed of the synthetic mix and of the job.", rich_help_panel="Workload")
    ] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers as JSON.", rich_help_panel="Output", show_default=False)
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option(
            "-q", "--quiet", metavar=" ", help="No progress on stderr; the report at the end is printed.", rich_help_panel="Output"
        ),
    ] = False,
    model_flags: ModelFlags = ModelFlags(),
    engine_flags: EngineFlags = EngineFlags(),
    general: GeneralFlags = GeneralFlags(),
) -> int:
    """Measure throughput on one workload, beside the physical limit of this machine.

    batchinfer bench --rows 16
    batchinfer bench --workload prompts.jsonl --concurrency 64 --json result.json

    All rows are waiting at the start, as in an offline job; --concurrency N keeps at most N of them running. Ctrl-C ends
    it early and reports what was measured until then.
    """
    if rows is not None and rows < 1:
        raise ConfigError(f"--rows {rows}: must be at least 1")
    config = engine_config(model_flags, engine_flags, seed)
    if config.fake_model and config.max_num_seqs is not None and workload is None:
        return _host_cost(config, json_file)
    return _throughput(config, workload, rows, json_file, quiet)


def _throughput(config: EngineConfig, path: Path | None, rows: int | None, json_file: Path | None, quiet: bool) -> int:
    from batchinfer.build import JobNeed, open_model
    from batchinfer.reports.bench import finish_seconds, run_workload
    from batchinfer.reports.metering import RunMeter
    from batchinfer.reports.summary import print_end
    from batchinfer.reports.wording import kernels_folded

    began = time.perf_counter()
    model = open_model(config)
    opened = time.perf_counter()
    load = _workload(path, rows, model, config)
    io_seconds = time.perf_counter() - opened
    meter = RunMeter(measure_again=True)
    need = JobNeed(pool_tokens=load.prompt_tokens + load.most_output_tokens)
    engine = meter.build_engine(config, model, need)
    engine.on_step = meter.step
    say = _Progress(quiet, len(load.requests))
    for line in [*_size(load, engine, meter.meter), *kernels_folded(engine.choices)]:
        say(line)
    result = run_workload(engine, load, say.tick)
    report = result.report
    report.model = config.model
    finish_seconds(report, (opened - began) + meter.load_seconds, io_seconds)
    summary = meter.summary(report)
    print_end(summary, sys.stderr, quiet=False)
    if inter_token := result.steps.inter_token_ms():
        print("inter-token latency: " + ", ".join(f"{name} {value:.1f} ms" for name, value in inter_token.items()), file=sys.stderr)
    write_json(
        json_file,
        {**summary.as_dict(), **result.extra_keys(), "workload": load.name, "interrupted": bool(report.interrupted), "command": sys.argv},
    )
    return report.exit_code


def _size(load: Workload, engine: Engine, meter: LimitMeter | None) -> list[str]:
    """What there is to do, and the time that it takes at least."""
    from batchinfer.reports.plan import least_seconds
    from batchinfer.reports.wording import in_words

    prompts = [len(request.prompt_ids) for request in load.requests]
    outputs = [request.params.max_tokens for request in load.requests]
    most = "" if all(request.params.ignore_eos for request in load.requests) else "at most "
    lines = [f"workload: {load.name}, {len(load.requests):,} rows, {sum(prompts):,} prompt tokens, {most}{sum(outputs):,} output tokens"]
    if meter is not None:
        limits = engine.limits
        at_once = min(len(prompts), limits.max_num_seqs, max(1, limits.pool_tokens * len(prompts) // max(1, sum(prompts) + sum(outputs))))
        least = least_seconds(meter.dims, meter.rates, (prompts, outputs), at_once)
        lines.append(
            f"time: {in_words(least)} at the machine's physical limit, a few times that as a rule; --rows N takes fewer, Ctrl-C ends early"
        )
    return lines


def _workload(path: Path | None, rows: int | None, model: Any, config: EngineConfig) -> Workload:
    from batchinfer.reports.workload import CHAT_ROWS, chat_mix, read_workload

    if path is not None:
        return read_workload(path, model.tokenizer, rows)
    return chat_mix(model.tokenizer.vocabulary, config.seed, rows or CHAT_ROWS, model.max_model_len)


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


class _Progress:
    """A line every ten seconds."""

    def __init__(self, quiet: bool, rows: int) -> None:
        self.quiet = quiet
        self.rows = rows
        self.next_at = PROGRESS_SECONDS

    def __call__(self, line: str) -> None:
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)

    def tick(self, engine: Any, done: int, seconds: float) -> None:
        if seconds >= self.next_at:
            self.next_at = seconds + PROGRESS_SECONDS
            stats = engine.stats
            self(
                f"[{seconds:.0f} s] rows {done:,}/{self.rows:,} done, {stats.running:,} running, {stats.waiting:,} waiting; "
                f"{stats.output_tokens / seconds:,.0f} output tokens/s"
            )
