"""The end of a run: `OUTPUT.report.json` with stable keys, and the table a person reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchinfer.core.stats import RunStats
from batchinfer.job import JobReport
from batchinfer.machine import Machine, read_machine, read_versions
from batchinfer.reports.limit import LimitMeter, LimitReport, gap_reasons
from batchinfer.reports.predict import StepForecast
from batchinfer.reports.stage_table import stage_table
from batchinfer.reports.wording import in_words, plural
from batchinfer.stopwatch import StageTime

ERRORS_SHOWN = 5
PLAIN_WIDTH = 100
STAGE_NAMES = {
    "start": "start of the process",
    "load": "load the model",
    "prefill": "prefill",
    "decode": "decode",
    "sample": "sample",
    "host": "schedule and retire",
    "io": "read, tokenise, write",
}


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A finished run with what it is judged by."""

    report: JobReport
    limit: LimitReport | None = None  # None: nothing ran, or the forward pass was a fake
    reasons: list[str] = field(default_factory=list)  # what lies between the run and its limit
    forecast: StepForecast | None = None  # None: what a step costs here was not known
    stages: Sequence[StageTime] = ()  # empty: nobody asked for them
    machine: Machine = field(default_factory=read_machine)
    versions: dict[str, str] = field(default_factory=read_versions)

    @classmethod
    def of(
        cls, report: JobReport, meter: LimitMeter | None, forecast: StepForecast | None = None, stages: Sequence[StageTime] = ()
    ) -> RunSummary:
        """The summary of a report, judged by the steps that the meters saw."""
        if forecast is not None and not forecast.measured_seconds:
            forecast = None
        if meter is None or not meter.steps or report.seconds.run <= 0:
            return cls(report, forecast=forecast, stages=stages)
        reasons = gap_reasons(meter, stage_seconds(report), report.stats.recomputed_tokens, report.stats.computed_tokens)
        return cls(report, meter.against(report.seconds.run), reasons, forecast, stages)

    def as_dict(self) -> dict[str, Any]:
        """The report's keys, as `OUTPUT.report.json` and `bench --json` hold them."""
        report = self.report
        return {
            "rows": {
                "total": report.rows_total,
                "ok": report.rows_ok,
                "failed": report.rows_failed,
                "clipped": report.rows_clipped,
                "truncated": report.rows_truncated,
                "skipped": report.rows_skipped,
            },
            "tokens": {"prompt": report.prompt_tokens, "cached_prompt": report.cached_prompt_tokens, "output": report.output_tokens},
            "seconds": {name: round(value, 4) for name, value in stage_seconds(report).items()},
            "throughput": {
                "output_tokens_per_s": round(output_rate(report), 2),
                "total_tokens_per_s": round(total_rate(report), 2),
            },
            "limit_fraction": None if self.limit is None else round(self.limit.fraction, 4),
            "limit": None if self.limit is None else self.limit.as_dict(),
            "predicted_seconds": None if self.forecast is None else round(self.forecast.predicted_seconds, 3),
            "step_seconds": None if self.forecast is None else round(self.forecast.measured_seconds, 3),
            "timings": [rounded(asdict(stage)) for stage in self.stages],
            "host_ms_per_step": round(host_ms_per_step(report), 4),
            "preemptions": report.stats.preemptions,
            "prefix_hit_rate": round(report.stats.prefix_hit_rate, 4),
            "speculation": speculation(report.stats),
            "finish_reasons": dict(report.finish_reasons),
            "error_codes": dict(report.error_codes),
            "peak_rss_mb": report.peak_rss_mb,
            "steps": report.stats.steps,
            "input": report.input,
            "output": report.output,
            "model": report.model,
            "settings": {key: plain_value(value) for key, value in report.settings.items()},
            "choices": list(report.choices),
            "versions": self.versions,
            "machine": self.machine.as_dict(),
        }


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    """The values with their seconds to a tenth of a millisecond."""
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}


def speculation(stats: RunStats) -> dict[str, Any]:
    """What drafts came to. Each accepted token saved its row one step."""
    return {
        "proposed_tokens": stats.proposed_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "acceptance_rate": round(stats.accepted_tokens / stats.proposed_tokens, 4) if stats.proposed_tokens else None,
        "mean_accepted_length": round(stats.accepted_tokens / stats.drafted_spans, 3) if stats.drafted_spans else None,
        "row_steps_saved": stats.accepted_tokens,
    }


def stage_seconds(report: JobReport) -> dict[str, float]:
    """Where the wall time went."""
    s = report.seconds
    return {
        "wall": s.wall,
        "start": s.start,
        "load": s.load,
        "prefill": s.prefill,
        "decode": s.decode,
        "sample": s.sample,
        "io": s.io,
        "host": s.schedule + s.retire,
        "run": s.run,
    }


def output_rate(report: JobReport) -> float:
    """Output tokens a second from the first admitted row to the last finished one."""
    return report.output_tokens / report.seconds.run if report.seconds.run > 0 else 0.0


def total_rate(report: JobReport) -> float:
    """Prompt and output tokens a second from the first admitted row to the last finished one."""
    return (report.prompt_tokens + report.output_tokens) / report.seconds.run if report.seconds.run > 0 else 0.0


def host_ms_per_step(report: JobReport) -> float:
    """Milliseconds of a step outside forward pass and sampling."""
    host = report.seconds.schedule + report.seconds.retire
    return 1e3 * host / report.stats.steps if report.stats.steps else 0.0


def plain_value(value: Any) -> Any:
    """A setting as JSON can hold it."""
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def finish_line(report: JobReport) -> str:
    """The last word of a run."""
    return f"{report.rows_ok:,} succeeded, {report.rows_failed:,} failed"


def end_table(summary: RunSummary) -> Table:
    """The end report: what was done, how fast, and where the time went."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in [*_work_lines(summary), *_speed_lines(summary)]:
        table.add_row(name, text)
    return table


def report_console(stream: TextIO) -> Console:
    """A console for a report: as wide as the terminal, or of a fixed width and without colours where there is none."""
    plain = not stream.isatty()
    return Console(file=stream, highlight=False, no_color=plain, force_terminal=not plain, width=PLAIN_WIDTH if plain else None)


def print_end(summary: RunSummary, stream: TextIO | None, quiet: bool) -> None:
    """Write the end report and the finish line; with `quiet` the finish line alone."""
    if stream is None:
        return
    report = summary.report
    if not quiet:
        console = report_console(stream)
        if report.stats.steps:
            console.print()
            console.print(end_table(summary))
        if summary.stages:
            console.print()
            console.print(stage_table(summary.stages))
        for message in report.first_errors[:ERRORS_SHOWN]:
            console.print(Text(message, style="red"), soft_wrap=True)
        if report.message:
            console.print(Text(report.message), soft_wrap=True)
        if report.output and report.output != "-" and not report.interrupted:
            console.print(Text(f"results: {report.output}"), soft_wrap=True)
    stream.write(finish_line(report) + "\n")
    stream.flush()


def _work_lines(summary: RunSummary) -> list[tuple[str, str]]:
    report = summary.report
    before = f", {report.rows_done_before:,} of them by an earlier run" if report.rows_done_before else ""
    total = report.rows_total if report.num_rows is None else report.num_rows
    lines = [("rows", f"{report.rows_ok:,} ok, {report.rows_failed:,} failed, {total:,} in all{before}")]
    if report.finish_reasons:
        lines.append(("finish reasons", ", ".join(f"{name} {count:,}" for name, count in sorted(report.finish_reasons.items()))))
    if report.rows_clipped:
        lines.append(
            ("clipped", f"{plural(report.rows_clipped, 'row')} ended early because context or KV pool were smaller than max_tokens")
        )
    if report.rows_truncated or report.rows_skipped:
        lines.append(("too long", f"{plural(report.rows_truncated, 'prompt')} cut to fit, {plural(report.rows_skipped, 'row')} skipped"))
    if report.error_codes:
        lines.append(("errors", ", ".join(f"{code} {count:,}" for code, count in sorted(report.error_codes.items()))))
    cached = f", {report.cached_prompt_tokens:,} of them from the prefix cache" if report.cached_prompt_tokens else ""
    lines.append(("prompt tokens", f"{report.prompt_tokens:,}{cached}"))
    lines.append(("output tokens", f"{report.output_tokens:,}"))
    stats = report.stats
    if stats.proposed_tokens:
        rate, mean = stats.accepted_tokens / stats.proposed_tokens, stats.accepted_tokens / stats.drafted_spans
        lines.append(
            (
                "speculation",
                f"{stats.accepted_tokens:,} of {stats.proposed_tokens:,} guessed tokens accepted ({rate:.0%}), {mean:.1f} a guess: "
                "each saved its row a step",
            )
        )
    peak = f"{stats.peak_blocks_used / stats.blocks_total:.0%} of the KV pool" if stats.blocks_total else ""
    lines.append(("at most", f"{plural(stats.peak_running, 'row')} at once, {peak}; {plural(stats.preemptions, 'preemption')}"))
    return lines


def _speed_lines(summary: RunSummary) -> list[tuple[str, str]]:
    report, limit = summary.report, summary.limit
    seconds = stage_seconds(report)
    lines = [("tokens a second", f"{output_rate(report):,.1f} output, {total_rate(report):,.1f} with prompts")]
    if limit is not None:
        lines.append(
            (
                "physical limit",
                f"{limit.fraction:.0%} of it reached (MFU {limit.mfu:.0%}, MBU {limit.mbu:.0%}; the machine: {limit.rates.in_words()})",
            )
        )
        if summary.reasons:
            lines.append(("the rest", "; ".join(summary.reasons)))
    if (forecast := summary.forecast) is not None:
        expected, took = in_words(forecast.predicted_seconds), in_words(forecast.measured_seconds)
        lines.append(("steps", f"predicted {expected} from this machine's calibration, measured {took}"))
    lines.append(("wall time", f"{in_words(seconds['wall'])}, {plural(report.stats.steps, 'step')}"))
    for stage, name in STAGE_NAMES.items():
        if seconds[stage] > 0:
            share = seconds[stage] / seconds["wall"] if seconds["wall"] else 0.0
            lines.append(("  " + name, f"{in_words(seconds[stage]):>12} {share:6.1%}"))
    lines.append(("peak memory", f"{report.peak_rss_mb:,.0f} MB"))
    return lines
