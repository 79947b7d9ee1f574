"""`batchinfer sweep-kv`: how many requests complete, and how fast, as the KV pool shrinks."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from batchinfer.cli.flags import EngineFlags, GeneralFlags, ModelFlags, gathers_flags, name_list, parse_count
from batchinfer.cli.measure_flags import ReportFlags, WorkloadFlags
from batchinfer.cli.settings import SAME_TYPE, engine_config
from batchinfer.errors import ConfigError

if TYPE_CHECKING:
    from batchinfer.build import ModelHandle
    from batchinfer.config import EngineConfig
    from batchinfer.reports.sweep import Pool
    from batchinfer.reports.workload import Workload


def _list(*names: str, text: str) -> str | None:
    option: str | None = typer.Option(*names, metavar="N,N", help=text, rich_help_panel="Pools", show_default=False)
    return option


@gathers_flags
def sweep_kv(
    tokens: Annotated[
        str | None, _list("--tokens", text="Pool sizes in tokens (4096,8192,16384,32768, or fitted to the workload).")
    ] = None,
    blocks: Annotated[str | None, _list("--blocks", text="Pool sizes in blocks instead.")] = None,
    kv_dtypes: Annotated[
        str | None,
        typer.Option(
            "--kv-dtypes",
            metavar="TYPE,TYPE",
            help="Compare formats of keys and values at equal bytes, such as bf16,int8; sizes are those of the first.",
            rich_help_panel="Pools",
            show_default=False,
        ),
    ] = None,
    workload_flags: WorkloadFlags = WorkloadFlags(),
    report_flags: ReportFlags = ReportFlags(),
    model_flags: ModelFlags = ModelFlags(),
    engine_flags: EngineFlags = EngineFlags(),
    general: GeneralFlags = GeneralFlags(),
) -> int:
    """Measure how throughput and completion change with the size of the KV pool.

    batchinfer sweep-kv

    batchinfer sweep-kv --kv-dtypes bf16,int8 --html sweep.html --json sweep.json

    batchinfer sweep-kv --workload prompts.jsonl --tokens 2048,4096,8192

    The largest pool runs to the end; the others get as many engine steps as it took. Blocks have 16 tokens unless
    --block-size says otherwise. Ctrl-C ends it early and reports what was measured until then.
    """
    workload_flags.check()
    report_flags.check()
    if engine_flags.num_kv_blocks is not None or engine_flags.kv_cache_memory is not None:
        raise ConfigError("sweep-kv sets the size of the KV pool itself: give its sizes with --tokens or --blocks")
    if tokens is not None and blocks is not None:
        raise ConfigError("--tokens and --blocks both give the sizes of the pools; give one of them")
    if kv_dtypes is not None and engine_flags.kv_cache_dtype != "auto":
        raise ConfigError("--kv-dtypes and --kv-cache-dtype both name the format of keys and values; give one of them")
    config = engine_config(model_flags, engine_flags, workload_flags.seed)
    asked = _counts("--tokens", tokens), _counts("--blocks", blocks)
    names = [SAME_TYPE.get(name, name) for name in name_list(kv_dtypes) or (config.kv_cache_dtype,)]
    for name in names:
        replace(config, kv_cache_dtype=name)  # refuses a wrong one before anything is loaded
    return _sweep(config, asked, names, workload_flags, report_flags)


def _sweep(config: EngineConfig, asked: tuple[list[int], list[int]], kv_dtypes: list[str], flags: WorkloadFlags, out: ReportFlags) -> int:
    from batchinfer.build import JobNeed, WeightShelf, build_engine, open_model
    from batchinfer.engine import Engine
    from batchinfer.reports.measuring_face import MeasuringFace
    from batchinfer.reports.provenance import Provenance
    from batchinfer.reports.summary import report_console
    from batchinfer.reports.sweep import DEFAULT_BLOCK_SIZE, DEFAULT_ROWS, SweepReport, sweep
    from batchinfer.reports.sweep_table import sweep_picture

    config = replace(config, block_size=config.block_size or DEFAULT_BLOCK_SIZE)
    model, shelf = open_model(config), WeightShelf()

    def build(pool: Pool) -> Engine:
        settings = replace(config, num_kv_blocks=pool.blocks, kv_cache_dtype=pool.kv_dtype)
        return build_engine(settings, model, JobNeed(pool.tokens), shelf)

    with MeasuringFace(out.quiet, sys.stderr) as face:
        load = flags.load(model, face, DEFAULT_ROWS)
        report = SweepReport(Provenance.of(config.model, load, flags.seed))
        pools = _pools(config, model, (asked, kv_dtypes), load, report.provenance.choices)
        for line in (f"workload: {load.described()}", *report.provenance.choices):
            face.say(line)
        sweep(report, pools, load, build, face.progress)
    report_console(sys.stderr).print(sweep_picture(report))
    out.write("How large the KV pool must be", report.as_dict())
    return 130 if report.interrupted else 0


def _pools(
    config: EngineConfig, model: ModelHandle, asked: tuple[tuple[list[int], list[int]], list[str]], load: Workload, choices: list[str]
) -> list[Pool]:
    """The pools in the order of their runs: of each dtype the largest first."""
    from batchinfer.build import compute_target, engine_limits, kv_dtype_of
    from batchinfer.reports.sweep import Pool, at_equal_bytes, blocks_for, pool_sizes

    target, size = compute_target(config, model), config.block_size or 0
    (tokens, blocks), kv_dtypes = asked
    if not tokens and not blocks:
        tokens, why = pool_sizes(load, config.max_num_seqs or len(load.requests))
        choices.append(f"pools of {', '.join(f'{n:,}' for n in tokens)} tokens ({why})")
    counts = sorted({*blocks, *(blocks_for(count, size) for count in tokens)}, reverse=True)
    first: list[Pool] = []
    others: list[Pool] = []
    for name in kv_dtypes:
        settings = replace(config, kv_cache_dtype=name, num_kv_blocks=2)
        per_token = engine_limits(settings, model, target, None)[0].kv_bytes_per_token
        resolved = kv_dtype_of(settings, target)
        if first:
            others += at_equal_bytes(first, resolved, per_token)
        else:
            first = [Pool(count, size, resolved, per_token) for count in counts]
    return first + others


def _counts(flag: str, text: str | None) -> list[int]:
    values = [parse_count(part) for part in name_list(text) or ()]
    if any(value < 1 for value in values):
        raise ConfigError(f"{flag} {text}: sizes must be at least 1")
    return values
