"""How completion and throughput change with the size of the KV pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from batchinfer.errors import InputError
from batchinfer.reports.agreement import Agreement
from batchinfer.reports.provenance import Provenance
from batchinfer.reports.wording import plural
from batchinfer.reports.workload import Workload

if TYPE_CHECKING:
    from batchinfer.engine import Engine

DEFAULT_ROWS = 120
DEFAULT_TOKENS = (4096, 8192, 16_384, 32_768)
DEFAULT_BLOCK_SIZE = 16
FITS_DEFAULT = (8192, 131_072)  # tokens that a workload could hold at once for the default pools to say something


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool to measure with. `blocks` are those that hold tokens; `tokens` is what they hold."""

    blocks: int
    block_size: int
    kv_dtype: str
    bytes_per_token: int

    @property
    def tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.blocks * self.block_size


@dataclass(frozen=True, slots=True)
class PoolResult:
    """What a pool made of the workload within the step budget."""

    pool: Pool
    requests: int
    completed: int
    never_fit: int  # requests longer than the pool: they were not started
    longest: int  # tokens of the longest request
    steps: int
    seconds: float
    output_tokens: int
    preemptions: int
    recomputed_tokens: int
    peak_running: int
    prefix_hit_rate: float
    agreement: Agreement | None  # with the reference run: the first dtype's largest pool

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens a second, those of unfinished requests included."""
        return self.output_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def note(self) -> str:
        """What a person should know of this row; nothing as a rule."""
        if not self.never_fit:
            return ""
        return f"too small for {plural(self.never_fit, 'request')} of {self.requests:,}: the longest needs {self.longest:,} tokens"

    def as_dict(self) -> dict[str, Any]:
        """For a JSON report."""
        return {
            "tokens": self.pool.tokens,
            "blocks": self.pool.blocks,
            "block_size": self.pool.block_size,
            "kv_dtype": self.pool.kv_dtype,
            "bytes": self.pool.tokens * self.pool.bytes_per_token,
            "completed": self.completed,
            "requests": self.requests,
            "output_tokens_per_s": round(self.output_tokens_per_s, 2),
            "preemptions": self.preemptions,
            "recomputed_tokens": self.recomputed_tokens,
            "peak_running": self.peak_running,
            "prefix_hit_rate": round(self.prefix_hit_rate, 4),
            "steps": self.steps,
            "seconds": round(self.seconds, 4),
            "too_small_for": self.never_fit,
            "note": self.note,
            **(self.agreement.as_dict() if self.agreement is not None else {}),
        }


@dataclass(slots=True)
class SweepReport:
    """Pools in the order in which they are shown: by dtype, smallest first."""

    provenance: Provenance
    settings: dict[str, Any] = field(default_factory=dict)
    step_budget: int = 0  # steps that the largest pool took
    results: list[PoolResult] = field(default_factory=list)
    interrupted: bool = False

    def of_dtype(self, kv_dtype: str) -> list[PoolResult]:
        """The results of one dtype, smallest pool first."""
        return sorted((r for r in self.results if r.pool.kv_dtype == kv_dtype), key=lambda r: r.pool.tokens)

    @property
    def kv_dtypes(self) -> list[str]:
        """The dtypes measured, in the order asked for."""
        return list(dict.fromkeys(r.pool.kv_dtype for r in self.results))

    def smallest_complete(self, kv_dtype: str) -> PoolResult | None:
        """The smallest pool with which, and with all larger ones, every request completed; None when there is none."""
        found = None
        for result in reversed(self.of_dtype(kv_dtype)):
            if result.completed < result.requests:
                break
            found = result
        return found

    def as_dict(self) -> dict[str, Any]:
        """For a JSON report."""
        smallest = {name: self.smallest_complete(name) for name in self.kv_dtypes}
        return {
            "pools": [result.as_dict() for name in self.kv_dtypes for result in self.of_dtype(name)],
            "step_budget": self.step_budget,
            "smallest_complete": {name: None if r is None else r.pool.tokens for name, r in smallest.items()},
            "settings": self.settings,
            "interrupted": self.interrupted,
            **self.provenance.as_dict(),
        }


def pool_sizes(workload: Workload, rows_at_once: int) -> tuple[list[int], str]:
    """(tokens of each pool, why): the default range, or one that is fitted to the workload where that would say nothing."""
    wanted = sum(sorted(workload.lengths, reverse=True)[:rows_at_once])
    low, high = FITS_DEFAULT
    if low <= wanted <= high and workload.longest <= DEFAULT_TOKENS[-1]:
        return list(DEFAULT_TOKENS), "the default"
    sizes = [max(DEFAULT_BLOCK_SIZE, wanted // part) for part in (8, 4, 2, 1)]
    return sizes, f"fitted to the workload, whose rows can hold {wanted:,} tokens at once"


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold at least so many tokens."""
    return max(2, -(-tokens // block_size))


def at_equal_bytes(pools: Sequence[Pool], kv_dtype: str, bytes_per_token: int) -> list[Pool]:
    """Pools of the same bytes with keys and values in another format."""
    return [
        replace(
            pool, blocks=max(2, pool.blocks * pool.bytes_per_token // bytes_per_token), kv_dtype=kv_dtype, bytes_per_token=bytes_per_token
        )
        for pool in pools
    ]


def sweep(
    report: SweepReport, pools: Sequence[Pool], workload: Workload, build: Callable[[Pool], Engine], tell: Callable[[str], None]
) -> None:
    """Fill the report. The first pool is the largest of its dtype: it runs to the end, and its steps are everyone's budget.

    Ctrl-C ends it early: the report holds the pools measured until then.
    """
    reference: dict[int, np.ndarray] = {}
    try:
        for index, pool in enumerate(pools):
            engine = build(pool)
            report.settings = report.settings or {key: str(value) for key, value in engine.settings.items()}
            place = f"pool {index + 1} of {len(pools)}, {pool.tokens:,} tokens {pool.kv_dtype}: "
            result, outputs = _run(engine, pool, workload, report.step_budget or None, partial(_tell_where, tell, place))
            if not index:
                report.step_budget, reference = result.steps, outputs
            report.results.append(replace(result, agreement=Agreement.of(reference, outputs)))
    except KeyboardInterrupt:
        report.interrupted = True


def _tell_where(tell: Callable[[str], None], place: str, line: str) -> None:
    tell(place + line)


def _run(
    engine: Engine, pool: Pool, workload: Workload, budget: int | None, tell: Callable[[str], None]
) -> tuple[PoolResult, dict[int, np.ndarray]]:
    """Run the requests that fit for at most `budget` steps."""
    most = engine.limits.pool_tokens + 1  # the last token needs no KV
    never_fit = 0
    for request, length in zip(workload.requests, workload.lengths, strict=True):
        if min(length, engine.limits.max_model_len) > most:
            never_fit += 1
            continue
        try:
            engine.add(request)
        except InputError:
            never_fit += 1
    outputs: dict[int, np.ndarray] = {}
    stats, total = engine.stats, len(workload.requests)
    began = time.perf_counter()
    while engine.num_unfinished and (budget is None or stats.steps < budget):
        for ended in engine.step():
            if ended.error is None:
                outputs[ended.row] = ended.token_ids
        of = f" of {budget:,}" if budget is not None else ""
        tell(
            f"step {stats.steps:,}{of}, {len(outputs):,} of {total:,} completed, {stats.running:,} running, {stats.preemptions:,} preemptions"
        )
    seconds = time.perf_counter() - began
    engine.abort()
    result = PoolResult(
        pool=pool,
        requests=total,
        completed=len(outputs),
        never_fit=never_fit,
        longest=workload.longest,
        steps=stats.steps,
        seconds=seconds,
        output_tokens=stats.output_tokens,
        preemptions=stats.preemptions,
        recomputed_tokens=stats.recomputed_tokens,
        peak_running=stats.peak_running,
        prefix_hit_rate=stats.prefix_hit_rate,
        agreement=None,
    )
    return result, outputs
