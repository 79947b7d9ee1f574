"""`batchinfer ablate`: what each feature of the engine is worth on this machine, this model, this workload."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchinfer.cli.flags import EngineFlags, GeneralFlags, ModelFlags, gathers_flags, name_list, parse_count
from batchinfer.cli.measure_flags import ReportFlags, WorkloadFlags
from batchinfer.cli.settings import engine_config
from batchinfer.errors import ConfigError

if TYPE_CHECKING:
    from batchinfer.build import ModelHandle
    from batchinfer.config import EngineConfig
    from batchinfer.reports.ablation import Column
    from batchinfer.reports.variants import Feature

DEFAULT_CONCURRENCY = 64
DEFAULT_BUDGET_S = 480.0
LEAST_BUDGET_S = 5.0
ROWS_PER_CONCURRENCY = 4  # of a synthetic mix


@gathers_flags
def ablate(
    max_num_seqs: Annotated[
        list[str] | None,
        typer.Option(
            "--concurrency",
            "--max-num-seqs",
            metavar="N",
            help="Requests kept running; may be given again, one column each (64).",
            rich_help_panel="What to measure",
            show_default=False,
        ),
    ] = None,
    ladder: Annotated[
        bool,
        typer.Option(
            "--ladder",
            metavar=" ",
            help="Also climb from the naive loop upwards, one feature at a time.",
            rich_help_panel="What to measure",
        ),
    ] = False,
    features: Annotated[
        str | None,
        typer.Option(
            "--features",
            metavar="A,B",
            help="Leave out only these, one at a time (all).",
            rich_help_panel="What to measure",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            "--repeats",
            metavar="N",
            help="Rounds, each with every variant once (as many as fit, from 3).",
            rich_help_panel="What to measure",
            show_default=False,
        ),
    ] = None,
    budget_s: Annotated[
        float,
        typer.Option(
            "--budget-s",
            metavar="S",
            help="Seconds for all of it; sizes and rounds follow (480).",
            rich_help_panel="What to measure",
            show_default=False,
        ),
    ] = DEFAULT_BUDGET_S,
    workload_flags: WorkloadFlags = WorkloadFlags(),
    report_flags: ReportFlags = ReportFlags(),
    model_flags: ModelFlags = ModelFlags(),
    engine_flags: EngineFlags = EngineFlags(),
    general: GeneralFlags = GeneralFlags(),
) -> int:
    """Measure what each engine feature is worth: everything on, and each one left out in turn.

    batchinfer ablate --concurrency 64

    batchinfer ablate --concurrency 1 --concurrency 64 --ladder --html ablate.html --json ablate.json

    batchinfer ablate --workload prompts.jsonl --features prefix_cache,speculation

    Everything on means 8-bit weights (--quantization int4: 4 bits) and 8-bit keys and values, too. A feature that is
    turned off on the command line, such as with --no-paged, stays off and is not measured. Ctrl-C ends it early and
    reports what was measured until then.
    """
    workload_flags.check()
    report_flags.check()
    counts = [parse_count(text) for text in max_num_seqs or [str(DEFAULT_CONCURRENCY)]]
    if any(not 1 <= count <= 65_536 for count in counts):
        raise ConfigError(f"--concurrency {min(counts)}: must be from 1 to 65,536")
    if repeats is not None and repeats < 1:
        raise ConfigError(f"--repeats {repeats}: must be at least 1")
    if not budget_s >= LEAST_BUDGET_S:
        raise ConfigError(f"--budget-s {budget_s:g}: must be at least {LEAST_BUDGET_S:g}")
    if engine_flags.num_kv_blocks is not None:
        raise ConfigError("--num-kv-blocks means other bytes in other formats: give the size of the KV pool with --kv-cache-memory")
    config = engine_config(model_flags, engine_flags, workload_flags.seed)
    asked = (list(dict.fromkeys(counts)), ladder, name_list(features))
    return _ablate(config, asked, (budget_s, repeats), workload_flags, report_flags)


def _ablate(
    config: EngineConfig,
    asked: tuple[list[int], bool, tuple[str, ...] | None],
    limits: tuple[float, int | None],
    flags: WorkloadFlags,
    out: ReportFlags,
) -> int:
    from batchinfer.build import open_model
    from batchinfer.reports.ablation import Ablation
    from batchinfer.reports.ablation_report import AblationReport
    from batchinfer.reports.ablation_table import ablation_picture
    from batchinfer.reports.measurement import Trials
    from batchinfer.reports.measuring_face import MeasuringFace
    from batchinfer.reports.provenance import Provenance
    from batchinfer.reports.summary import report_console

    began = time.monotonic()
    budget_s, repeats = limits
    model = open_model(config)
    present, notes = _features(config, model)
    columns = _columns(present, asked)
    with MeasuringFace(out.quiet, sys.stderr) as face:
        load = flags.load(model, face, ROWS_PER_CONCURRENCY * max(32, *asked[0]))
        face.say(f"workload: {load.described()}; runs take parts of it")
        for note in notes:
            face.say(note)
        trials = Trials(config, model, columns[0].everything, lambda line: face.progress(f"[{time.monotonic() - began:.0f} s] {line}"))
        left = budget_s - (time.monotonic() - began)
        ablation = Ablation(trials.measure, time.monotonic, face.say, left, repeats, trials.give_up_at, choices=list(notes))
        ablation.run(columns, load)
    provenance = replace(Provenance.of(config.model, load, flags.seed), choices=ablation.choices)
    report = AblationReport.of(ablation, provenance, trials.settings)
    report_console(sys.stderr).print(ablation_picture(report))
    out.write("What each feature is worth", {**report.as_dict(), "seconds": round(time.monotonic() - began, 1), "budget_s": budget_s})
    return 130 if report.interrupted else 0


def _columns(present: list[Feature], asked: tuple[list[int], bool, tuple[str, ...] | None]) -> list[Column]:
    from batchinfer.reports.ablation import Column
    from batchinfer.reports.variants import baseline, chosen_features, ladder, leave_one_out

    counts, climb, names = asked
    chosen = chosen_features(names, present)
    return [
        Column(count, baseline(present, count), leave_one_out(present, chosen, count), ladder(present, count) if climb else ())
        for count in counts
    ]


def _features(config: EngineConfig, model: ModelHandle) -> tuple[list[Feature], list[str]]:
    """The features that are measured, with what on means here; and notes on those that are not."""
    from batchinfer.build import compute_target
    from batchinfer.reports.variants import FEATURES

    on_cpu = compute_target(config, model).device.type == "cpu"
    present: list[Feature] = []
    notes: list[str] = []
    for feature in FEATURES:
        given: Any = getattr(config, feature.setting)
        if feature.name in ("quantization", "kv_quant") and not on_cpu:
            notes.append(f"{feature.name} is left out: not available on a GPU in this version")
        elif (feature.on is True and given is False) or (feature.name == "prefix_order" and given == feature.off):
            notes.append(f"{feature.name} is off on the command line, and stays off")
        elif feature.name in ("quantization", "kv_quant", "speculation") and given not in (feature.on, feature.off):
            present.append(replace(feature, on=given))  # such as int4, or a draft model
        else:
            present.append(feature)
    return present, notes
