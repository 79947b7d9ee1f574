"""One run of one configuration on one workload, and what it came to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from batchinfer.reports.latency import LatencyLog, Waits
from batchinfer.reports.variants import Variant
from batchinfer.reports.workload import Workload

if TYPE_CHECKING:
    from batchinfer.build import ModelHandle
    from batchinfer.config import EngineConfig
    from batchinfer.engine import Engine

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Facts:
    """What explains a run's speed."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    prefix_hit_rate: float = 0.0
    preemptions: int = 0
    peak_running: int = 0
    steps: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    kv_bytes_per_token: int = 0
    step_tokens: int = 0  # most tokens in one step
    failed_rows: int = 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a run came to. `seconds` from the first admitted row to the last finished one."""

    seconds: float
    output_tokens: int
    ttft: Waits | None = None
    itl: Waits | None = None
    peak_blocks: int = 0
    outputs: dict[int, np.ndarray] = field(default_factory=dict)  # int32 token ids by row
    facts: Facts = field(default_factory=Facts)

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds if self.seconds > 0 else 0.0


Measure = Callable[[Variant, Workload], Measurement]


class TooSlow(Exception):
    """A run was given up because the time for it was over."""


class Trials:
    """Measures variants of one configuration on one model, each run with an engine that remembers nothing.

    The weights are loaded once for each way of computing. The pool of every variant has the same bytes: what the widest
    rows that can run at once take with everything on. The context is that of the workload's longest row.
    """

    def __init__(self, config: EngineConfig, model: ModelHandle, everything: Variant, tell: Tell) -> None:
        from batchinfer.build import WeightShelf

        self._config = config
        self._model = model
        self._everything = everything
        self._tell = tell
        self._shelf = WeightShelf()
        self._deadline = float("inf")  # of time.monotonic()
        self.settings: dict[str, Any] = {}  # those of the first engine

    def give_up_at(self, moment: float) -> None:
        """A run that goes on after this time of `time.monotonic()` is given up."""
        self._deadline = moment

    def measure(self, variant: Variant, workload: Workload) -> Measurement:
        """Run the workload once. Raises `TooSlow` when the deadline passes."""
        engine = self._build(variant, workload)
        self.settings = self.settings or {key: str(value) for key, value in engine.settings.items()}
        for request in workload.requests:
            engine.add(request)
        log = LatencyLog()
        engine.on_step = log
        outputs: dict[int, np.ndarray] = {}
        failed = 0
        began = time.perf_counter()
        try:
            while engine.num_unfinished:
                for result in engine.step():
                    failed += result.error is not None
                    if result.error is None:
                        outputs[result.row] = result.token_ids
                self._tell(f"{variant.name} at {variant.concurrency}: {len(outputs):,} of {len(workload.requests):,} rows")
                if time.monotonic() > self._deadline:
                    raise TooSlow
        finally:
            seconds = time.perf_counter() - began
            engine.abort()
        stats = engine.stats
        facts = Facts(
            prompt_tokens=stats.prompt_tokens,
            prefill_seconds=stats.seconds.prefill,
            prefix_hit_rate=stats.prefix_hit_rate,
            preemptions=stats.preemptions,
            peak_running=stats.peak_running,
            steps=stats.steps,
            proposed_tokens=stats.proposed_tokens,
            accepted_tokens=stats.accepted_tokens,
            kv_bytes_per_token=engine.limits.kv_bytes_per_token,
            step_tokens=engine.limits.max_num_batched_tokens,
            failed_rows=failed,
        )
        return Measurement(seconds, stats.output_tokens, log.ttft, log.itl, stats.peak_blocks_used, outputs, facts)

    def pool_bytes(self, workload: Workload, concurrency: int) -> int:
        """Bytes of every variant's pool: the widest rows at once in the formats of everything on, and at least one row in any."""
        from batchinfer.build import batch_sizes, compute_target, engine_limits

        if self._config.kv_cache_memory is not None:
            return self._config.kv_cache_memory
        settings = replace(self._config, **dict(self._everything.changes), num_kv_blocks=2)
        target = compute_target(settings, self._model)
        size = batch_sizes(settings, target)["block_size"]
        narrow, widest = (
            engine_limits(replace(settings, kv_cache_dtype=name), self._model, target, None)[0].kv_bytes_per_token
            for name in (settings.kv_cache_dtype, "auto")
        )
        held = sorted((-(-(length + 1) // size) for length in workload.lengths), reverse=True)
        blocks = sum(held[:concurrency])
        spare = max(2, blocks // 20)  # what admission keeps free, and prefixes that outlive their rows
        return max((blocks + spare) * narrow, (held[0] + 2) * widest) * size

    def _build(self, variant: Variant, workload: Workload) -> Engine:
        from batchinfer.build import build_engine

        config = replace(
            self._config,
            **dict(variant.changes),
            max_num_seqs=variant.concurrency,
            kv_cache_memory=self.pool_bytes(workload, variant.concurrency),
        )
        model = replace(self._model, max_model_len=min(self._model.max_model_len, workload.longest + 1))
        return build_engine(config, model, None, self._shelf)
