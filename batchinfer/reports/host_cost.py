"""What a step costs the host: the engine with a fake forward pass, timed step by step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from batchinfer.core.request import Request, SamplingParams
from batchinfer.machine import speed_factor
from batchinfer.reports.mixes import churn_mix
from batchinfer.reports.workload import Workload

if TYPE_CHECKING:
    from batchinfer.core.stats import StepShape
    from batchinfer.core.vocabulary import Vocabulary
    from batchinfer.engine import Engine

TOKENS_PER_ROW = 600  # prompt and output of a row of the churn mix, on average
POOL_FILL = 1.5  # the pool over what running rows hold: the rest fills with reusable blocks, which are then evicted
BUDGET_PER_ROW = 3  # tokens a step may compute, over the rows that run
GENERATIONS = 4  # rows that pass through, over the rows that run
LOCKSTEP_TOKENS = 400  # long enough that the first row still runs when the last prompt is in
STOP_STRINGS = ("\n\nUser:", "<END>", "###", "Observation:")
TARGETS_MS = {"steady": 1.0, "decode": 0.3, "stops": 1.2}


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step as its caller sees it: rows handed in, the step itself, rows handed out."""

    milliseconds: float
    joined: int
    finished: int
    prefill_tokens: int
    running: int


@dataclass(frozen=True, slots=True)
class HostCost:
    """Median milliseconds of a step, and how much slower this machine's Python is than the targets' machine."""

    concurrency: int
    steady_ms: float  # rows join and finish
    decode_ms: float  # none does
    stops_ms: float  # steady, stop strings on every row
    evicted: bool  # the pool was full, and blocks were evicted for new rows
    preemptions: int
    steps: int
    speed: float

    def as_dict(self) -> dict[str, Any]:
        """For a JSON report."""
        times = {"steady_ms": self.steady_ms, "pure_decode_ms": self.decode_ms, "stop_strings_more_ms": self.stops_ms - self.steady_ms}
        return {
            "concurrency": self.concurrency,
            **{name: _rounded(value) for name, value in times.items()},
            "scaled": {name: _rounded(value / self.speed) for name, value in times.items()},
            "speed_factor": round(self.speed, 3),
            "pool_full": self.evicted,
            "preemptions": self.preemptions,
            "steps": self.steps,
        }

    def lines(self) -> list[str]:
        """For people."""
        rows = [
            ("steady, rows join and finish", self.steady_ms, TARGETS_MS["steady"]),
            ("pure decode", self.decode_ms, TARGETS_MS["decode"]),
            ("stop strings on every row, more", self.stops_ms - self.steady_ms, TARGETS_MS["stops"]),
        ]
        lines = [f"host cost of a step at {self.concurrency:,} running rows, fake forward pass, median of {self.steps:,} steps:"]
        for name, value, target in rows:
            lines.append(f"  {name:<34}{value:7.3f} ms   scaled {value / self.speed:6.3f} ms   target {target:.1f} ms")
        full = "full, reusable blocks were evicted" if self.evicted else "never full"
        lines.append(
            f"  speed factor of this machine's Python {self.speed:.2f} (times above are divided by it); KV pool {full}; {self.preemptions} preemptions"
        )
        return lines


def pool_tokens_for(concurrency: int) -> int:
    """KV tokens of a pool that the churn mix fills."""
    return int(concurrency * TOKENS_PER_ROW * POOL_FILL)


def measure_host_cost(build: Callable[[], Engine], vocabulary: Vocabulary, concurrency: int, seed: int = 0) -> HostCost:
    """Time the three scenarios on fresh engines. `build` makes one whose pool and budget fit the concurrency."""
    plain = churn_mix(vocabulary, GENERATIONS * concurrency, seed)
    stops = churn_mix(vocabulary, GENERATIONS * concurrency, seed, STOP_STRINGS)
    engine = build()
    steady = steady_steps(timed_steps(engine, plain), concurrency)
    stats = engine.stats
    stopping = steady_steps(timed_steps(build(), stops), concurrency)
    decoding = decode_steps(timed_steps(build(), lockstep(plain, concurrency)), concurrency)
    return HostCost(
        concurrency=concurrency,
        steady_ms=_median(steady),
        decode_ms=_median(decoding),
        stops_ms=_median(stopping),
        evicted=stats.computed_tokens > stats.blocks_total * engine.limits.block_size,
        preemptions=stats.preemptions,
        steps=len(steady),
        speed=speed_factor(),
    )


def timed_steps(engine: Engine, workload: Workload) -> list[StepTime]:
    """Every step of a workload, timed from outside with the handing in of new rows included."""
    requests = iter(workload.requests)
    ahead = max(2 * engine.limits.max_num_seqs, 512) // 4
    shape = _LastShape()
    engine.on_step = shape
    steps: list[StepTime] = []
    exhausted = False
    while not exhausted or engine.num_unfinished:
        running, waiting = engine.stats.running, engine.stats.waiting
        began = perf_counter()
        for _ in range(ahead - waiting):
            request = next(requests, None)
            if request is None:
                exhausted = True
                break
            engine.add(request)
        finished = len(engine.step())
        milliseconds = (perf_counter() - began) * 1e3
        joined = engine.stats.running - running + finished
        steps.append(StepTime(milliseconds, max(0, joined), finished, shape.prefill_tokens, engine.stats.running))
    return steps


def steady_steps(steps: list[StepTime], concurrency: int) -> list[StepTime]:
    """Steps with a full house in which rows joined or finished, after the first generation has left."""
    full = [i for i, step in enumerate(steps) if step.running >= 0.9 * concurrency]
    if not full:
        return []
    first, last = full[len(full) // 4], full[-1]
    return [s for s in steps[first : last + 1] if s.running >= 0.9 * concurrency and (s.finished or s.prefill_tokens)]


def decode_steps(steps: list[StepTime], concurrency: int) -> list[StepTime]:
    """Steps with a full house in which every row computed one token and none came or went."""
    return [s for s in steps if s.running >= 0.9 * concurrency and not s.finished and not s.prefill_tokens]


def lockstep(workload: Workload, concurrency: int) -> Workload:
    """As many rows as run at once, with outputs of one length: once all prompts are in, only decode steps are left."""
    params = SamplingParams(max_tokens=LOCKSTEP_TOKENS, ignore_eos=True)
    return Workload("lockstep", [Request(r.row, r.prompt_ids, params) for r in workload.requests[:concurrency]])


class _LastShape:
    """Remembers how many prefill tokens the last step had."""

    def __init__(self) -> None:
        self.prefill_tokens = 0

    def __call__(self, shape: StepShape) -> None:
        self.prefill_tokens = shape.num_prefill


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


def _median(steps: list[StepTime]) -> float:
    return statistics.median(s.milliseconds for s in steps) if steps else float("nan")
