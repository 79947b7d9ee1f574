"""The plan of a job: every row checked and counted, what fits in memory, how long at least; nothing is run."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from batchinfer.core.request import Request, Result
from batchinfer.io.record import InputRow
from batchinfer.io.truncate import SKIPPED
from batchinfer.reports.findings import Finding
from batchinfer.reports.lengths import RowLengths
from batchinfer.reports.limit import ModelDims
from batchinfer.reports.outlook import Outlook, kv_table, outlook_lines
from batchinfer.reports.place import Place
from batchinfer.reports.predict import RowSample
from batchinfer.reports.rates import MachineRates
from batchinfer.reports.wording import in_bytes, in_words, plural

POSITIONS_SHOWN = 8
PERCENTILES = (0, 50, 90, 99, 100)
HISTOGRAM_ROWS = 8
ID_COLUMNS = ("custom_id", "id")


@dataclass(slots=True)
class Trouble:
    """Rows that fail for the same reason: how many, the first of them, and what the first one says."""

    count: int = 0
    positions: list[int] = field(default_factory=list)
    message: str = ""


@dataclass(slots=True)
class RowTally:
    """What the rows of an input come to."""

    max_model_len: int
    id_column: str | None = None
    rows: int = 0
    troubles: dict[str, Trouble] = field(default_factory=dict)
    prompt_lengths: array[int] = field(default_factory=lambda: array("i"))
    output_limits: array[int] = field(default_factory=lambda: array("i"))  # of one answer
    answers: array[int] = field(default_factory=lambda: array("i"))
    sample: RowSample = field(default_factory=RowSample)  # to simulate
    clipped: int = 0  # rows whose max_tokens reach beyond the context
    duplicate_ids: int = 0
    first_duplicates: list[str] = field(default_factory=list)
    _ids: set[int] = field(default_factory=set)

    def see(self, row: InputRow) -> None:
        """Note the row's id."""
        name = self._id_of(row.values)
        if name is None:
            return
        mark = hash(name)  # 8 bytes a row instead of the id itself
        if mark in self._ids:
            self.duplicate_ids += 1
            if len(self.first_duplicates) < POSITIONS_SHOWN:
                self.first_duplicates.append(name[1])
        self._ids.add(mark)

    def count(self, prepared: Iterable[Request | Result]) -> None:
        """Count every prepared row."""
        for item in prepared:
            self.rows += 1
            if isinstance(item, Result):
                self._count_trouble(item)
                continue
            self.sample.see(item)
            room = self.max_model_len - len(item.prompt_ids)
            self.clipped += item.params.max_tokens > room
            self.prompt_lengths.append(len(item.prompt_ids))
            self.output_limits.append(min(item.params.max_tokens, room))
            self.answers.append(item.params.n)

    def lengths(self) -> RowLengths:
        """Those of every row that can run."""
        return RowLengths(*(np.array(each, np.int64) for each in (self.prompt_lengths, self.output_limits, self.answers)))

    @property
    def failed(self) -> int:
        """Rows that cannot run."""
        return sum(trouble.count for code, trouble in self.troubles.items() if code != SKIPPED)

    def _count_trouble(self, result: Result) -> None:
        assert result.error is not None
        trouble = self.troubles.setdefault(result.error.code, Trouble(message=result.error.message))
        trouble.count += 1
        if len(trouble.positions) < POSITIONS_SHOWN:
            trouble.positions.append(result.row)

    def _id_of(self, values: dict[str, Any] | None) -> tuple[str, str] | None:
        """The id with its type, so that 1 and "1" stay two."""
        if values is None:
            return None
        names = (self.id_column,) if self.id_column else ID_COLUMNS
        value = next((values[name] for name in names if values.get(name) is not None), None)
        return None if value is None else (type(value).__name__, str(value))


@dataclass(frozen=True, slots=True)
class Fit:
    """What fits into this machine's memory."""

    device: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    weight_bytes: int
    free_bytes: int
    kv_bytes_per_token: int
    pool_tokens: int
    rows_at_once: int  # of average length, were all to use their max_tokens
    reason: str


@dataclass(frozen=True, slots=True)
class JobPlan:
    """All that is known about a job without running it."""

    input: str
    model: str
    chat: bool
    tally: RowTally
    fit: Fit | None  # None: no row can run
    least_seconds: float | None  # were every row to use its max_tokens, at the machine's physical limit
    first_prompt: str | None
    outlook: Outlook | None = None  # None: no row can run, the model does not fit, or it is a fake
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 all rows fine, 3 some cannot run."""
        return 3 if self.tally.failed else 0

    def as_dict(self) -> dict[str, Any]:
        """For a JSON report."""
        tally, fit = self.tally, self.fit
        return {
            "input": self.input,
            "model": self.model,
            "rows": {"total": tally.rows, "ok": tally.rows - tally.failed, "failed": tally.failed, "clipped": tally.clipped},
            "errors": {code: {"count": t.count, "first_rows": t.positions, "message": t.message} for code, t in tally.troubles.items()},
            "duplicate_ids": {"count": tally.duplicate_ids, "first": tally.first_duplicates},
            "answers": sum(tally.answers),
            "tokens": {"prompt": sum(tally.prompt_lengths), "output_at_most": int(tally.lengths().generated.sum())},
            "prompt_tokens": percentiles(tally.prompt_lengths),
            "output_limits": percentiles(tally.output_limits),
            "fit": None if fit is None else {name: getattr(fit, name) for name in Fit.__slots__},
            "least_seconds": self.least_seconds,
            "findings": [finding.as_dict() for finding in self.findings],
            "outlook": None if self.outlook is None else self.outlook.as_dict(),
        }


def percentiles(values: array[int]) -> dict[str, int]:
    """Least, median, 90th and 99th percentile and most; empty for no values."""
    if not values:
        return {}
    found = np.percentile(np.array(values), PERCENTILES, method="higher")
    return {name: int(value) for name, value in zip(("min", "p50", "p90", "p99", "max"), found, strict=True)}


def fit_of(place: Place, tally: RowTally) -> Fit:
    """Weights, KV bytes and pool of this job at a place."""
    limits = place.limits
    return Fit(
        device=place.device,
        dtype=place.dtype,
        quantization=place.quantization,
        kv_cache_dtype=place.kv_cache_dtype,
        weight_bytes=place.weight_bytes,
        free_bytes=place.free_bytes,
        kv_bytes_per_token=limits.kv_bytes_per_token,
        pool_tokens=limits.pool_tokens,
        rows_at_once=place.rows_at_once(tally.lengths(), limits.pool_tokens),
        reason=place.reason,
    )


def least_seconds(dims: ModelDims, rates: MachineRates, lengths: RowLengths, answers_at_once: float, cached_share: float = 0.0) -> float:
    """Seconds at the machine's physical limit for rows of these prompt and output lengths, prompts once for all their answers.

    `cached_share` of the prompt tokens are found in the prefix cache and not computed.
    """
    prompts, outputs = (each.astype(np.float64) for each in (lengths.prompts, lengths.outputs))
    computed = prompts * (1.0 - cached_share)
    generated = float(lengths.generated.sum())
    tokens = float(computed.sum()) + generated
    steps = generated / max(1.0, answers_at_once)
    linear = 2.0 * dims.layer_parameters * tokens + 2.0 * dims.head_parameters * generated
    weights = (dims.layer_bytes + dims.head_bytes) * steps
    decoded = float((lengths.generated * (prompts + outputs / 2)).sum())  # pairs of a new token and one before it
    decode = max(decoded * dims.kv_bytes / rates.bytes, decoded * dims.attention_flops / rates.attention_flops)
    prefill = float((computed * (prompts - computed / 2)).sum()) * dims.attention_flops
    return max(weights / rates.bytes, linear / rates.flops) + decode + prefill / rates.attention_flops


def plan_picture(plan: JobPlan) -> RenderableType:
    """The plan as a person reads it."""
    tally, fit = plan.tally, plan.fit
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("rows", f"{tally.rows:,}: {tally.rows - tally.failed:,} can run, {tally.failed:,} cannot")
    if tally.duplicate_ids:
        table.add_row("duplicate ids", f"{tally.duplicate_ids:,} ({', '.join(tally.first_duplicates)}); kept: rows go by position")
    if tally.prompt_lengths:
        table.add_row("prompt tokens", f"{sum(tally.prompt_lengths):,} in all; {_spread(tally.prompt_lengths)}")
        several = sum(tally.answers) > len(tally.answers)
        in_all = f"at most {int(tally.lengths().generated.sum()):,} in all"
        of = f" in {sum(tally.answers):,} answers; each" if several else ";"
        table.add_row("output tokens", f"{in_all}{of} {_spread(tally.output_limits)}")
    if tally.clipped:
        table.add_row("clipped", f"{plural(tally.clipped, 'row')} with max_tokens beyond the context of {tally.max_model_len:,} tokens")
    if fit is not None:
        weights = fit.dtype if fit.quantization == "none" else f"{fit.quantization}, computed in {fit.dtype}"
        table.add_row("memory", f"{in_bytes(fit.free_bytes)} free on {fit.device}; weights {in_bytes(fit.weight_bytes)} as {weights}")
        table.add_row(
            "KV pool",
            f"{fit.pool_tokens:,} tokens, {in_bytes(fit.pool_tokens * fit.kv_bytes_per_token)} at {fit.kv_bytes_per_token:,} bytes a token as {fit.kv_cache_dtype} ({fit.reason})",
        )
        table.add_row("at once", _at_once(fit.rows_at_once, len(tally.prompt_lengths)))
    if plan.least_seconds is not None:
        table.add_row(
            "at least", f"{in_words(plan.least_seconds)} if every row uses its max_tokens (a rough bound from this machine's limits)"
        )
    parts: list[RenderableType] = [table]
    if plan.outlook is not None:
        for name, text in outlook_lines(plan.outlook):
            table.add_row(name, text)
        parts += [Text(), kv_table(plan.outlook)]
    if tally.prompt_lengths:
        parts.append(Text("\nprompt lengths"))
        parts += [Text("  " + line) for line in histogram(tally.prompt_lengths)]
    if plan.findings:
        parts.append(Text("\nworth a look"))
        for finding in plan.findings:
            where = (
                ": " + ", ".join(map(str, finding.rows)) + (", ..." if finding.count > len(finding.rows) else "") if finding.rows else ""
            )
            parts.append(Text(f"  {finding.code}: {finding.message}{where}"))
    if tally.troubles:
        parts.append(Text("\nrows that cannot run"))
        for code, trouble in sorted(tally.troubles.items(), key=lambda item: -item[1].count):
            more = ", ..." if trouble.count > len(trouble.positions) else ""
            where = ("row " if trouble.count == 1 else "rows ") + ", ".join(map(str, trouble.positions))
            parts.append(Text(f"  {code}: {plural(trouble.count, 'row')}: {where}{more}; first: {trouble.message}"))
    return Group(*parts)


def print_plan(plan: JobPlan, console: Console) -> None:
    """Print a plan, the first rendered prompt included."""
    from batchinfer.reports.faces import indented

    for note in plan.notes:
        console.print(Text(note))
    if plan.first_prompt is not None:
        console.print(Text("first prompt, as the model sees it:\n" + indented(plan.first_prompt) + "\n"))
    console.print(plan_picture(plan))


def histogram(values: array[int]) -> list[str]:
    """Rows by prompt length, in ranges that double."""
    lengths = np.array(values, np.int64)
    edge = 16
    while edge * 2 ** (HISTOGRAM_ROWS - 1) < lengths.max():
        edge *= 2
    edges = [0, *(edge * 2**i for i in range(HISTOGRAM_ROWS))]
    counts = [int(((lengths > low) & (lengths <= high)).sum()) for low, high in pairwise(edges)]
    last = max(i for i, count in enumerate(counts) if count)
    first = min(i for i, count in enumerate(counts) if count)
    most = max(counts)
    return [
        f"{edges[i] + 1:>7,} to {edges[i + 1]:>7,}  {counts[i]:>9,}  {'█' * round(40 * counts[i] / most) or ('▏' if counts[i] else '')}"
        for i in range(first, last + 1)
    ]


def _at_once(fitting: int, rows: int) -> str:
    if fitting < rows:
        return f"about {plural(fitting, 'row')} of average length"
    return "the row fits" if rows == 1 else f"all {rows:,} rows fit at once"


def _spread(values: array[int]) -> str:
    found = percentiles(values)
    return f"least {found['min']:,}, median {found['p50']:,}, p90 {found['p90']:,}, p99 {found['p99']:,}, most {found['max']:,}"
