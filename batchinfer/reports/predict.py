"""Predicts a job by running everything but the model: the real scheduler, memory and prefix cache, on a clock of step costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from batchinfer.core.request import Request, SamplingParams
from batchinfer.reports.lengths import RowLengths

if TYPE_CHECKING:
    from batchinfer.build import ModelHandle
    from batchinfer.config import EngineConfig
    from batchinfer.core.admission import EngineLimits
    from batchinfer.core.stats import StepShape
    from batchinfer.core.step_cost import StepCost
    from batchinfer.engine import Engine

MOST_STEPS = 6000  # of a simulation, by a rough count beforehand: some seconds of host time
MOST_ROWS = 4096
MOST_TOKENS = 4 * 2**20  # of prompts that are kept
CHUNK_ROWS = 64  # neighbours stay together, since neighbours share prefixes


@dataclass(frozen=True, slots=True)
class Latency:
    """Median and 99th percentile, in milliseconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: np.ndarray) -> Latency | None:
        """Of some waits, float64 [n]; None for none."""
        if not len(seconds):
            return None
        p50, p99 = np.percentile(seconds * 1e3, (50, 99))
        return cls(round(float(p50), 2), round(float(p99), 2))


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a job is expected to come to if every row uses its `max_tokens`."""

    seconds: float  # from the first admitted row to the last finished one
    prompt_tokens: int
    output_tokens: int
    ttft_ms: Latency | None  # from a row's admission to its first token
    itl_ms: Latency | None  # between two tokens of a row
    prefix_hit_rate: float
    peak_blocks: int
    peak_running: int
    preemptions: int
    steps: int
    rows: int
    rows_simulated: int  # fewer than `rows`: evenly spread pieces of the input, scaled by tokens

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt and output tokens a second."""
        return (self.prompt_tokens + self.output_tokens) / self.seconds if self.seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For a JSON report."""
        return {
            "seconds": round(self.seconds, 3),
            "output_tokens_per_s": round(self.output_tokens_per_s, 2),
            "total_tokens_per_s": round(self.total_tokens_per_s, 2),
            "ttft_ms": None if self.ttft_ms is None else {"p50": self.ttft_ms.p50, "p99": self.ttft_ms.p99},
            "itl_ms": None if self.itl_ms is None else {"p50": self.itl_ms.p50, "p99": self.itl_ms.p99},
            "prefix_hit_rate": round(self.prefix_hit_rate, 4),
            "peak_blocks": self.peak_blocks,
            "peak_running": self.peak_running,
            "preemptions": self.preemptions,
            "steps": self.steps,
            "rows": self.rows,
            "rows_simulated": self.rows_simulated,
        }


@dataclass(slots=True)
class StepForecast:
    """Adds up what a run's steps were expected to take, beside what they took. Call it with every `StepShape`."""

    cost: StepCost
    predicted_seconds: float = 0.0
    measured_seconds: float = 0.0

    def __call__(self, shape: StepShape) -> None:
        """Count one step."""
        self.predicted_seconds += self.cost.of(shape)
        self.measured_seconds += shape.seconds


@dataclass(slots=True)
class RowSample:
    """Rows to simulate: all of them, or chunks of neighbours spread evenly over an input of any length."""

    output_length: int | None = None  # tokens that a row is expected to generate, where its max_tokens allow them
    rows: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    _chunks: list[list[Request]] = field(default_factory=list)
    _every: int = 1
    _held: int = 0  # prompt tokens in the chunks

    def see(self, request: Request) -> None:
        """Count a row, and keep it if its chunk is among those that are kept."""
        length = min(request.params.max_tokens, self.output_length or request.params.max_tokens)
        chunk, place = divmod(self.rows, CHUNK_ROWS)
        self.rows += 1
        self.prompt_tokens += len(request.prompt_ids)
        self.output_tokens += length * request.params.n
        if chunk % self._every:
            return
        if not place:
            self._chunks.append([])
        # A simulation says nothing that could end, be banned or be told of: of the parameters these alone change its steps.
        params = SamplingParams(max_tokens=length, ignore_eos=True, n=request.params.n, prompt_logprobs=request.params.prompt_logprobs)
        self._chunks[-1].append(replace(request, params=params))
        self._held += len(request.prompt_ids)
        while len(self._chunks) > 1 and (len(self._chunks) * CHUNK_ROWS > MOST_ROWS or self._held > MOST_TOKENS):
            self._every *= 2
            self._chunks = self._chunks[::2]
            self._held = sum(len(row.prompt_ids) for chunk in self._chunks for row in chunk)

    def lengths(self) -> RowLengths:
        """Those of the kept rows."""
        return RowLengths.of(row for chunk in self._chunks for row in chunk)

    def requests(self, rows_at_once: int) -> list[Request]:
        """As many of the kept rows as are simulated in some seconds, numbered anew."""
        chunks = self._chunks
        while (
            len(chunks) > 1 and RowLengths.of(row for chunk in chunks for row in chunk).generated.sum() / max(1, rows_at_once) > MOST_STEPS
        ):
            chunks = chunks[::2]
        rows = [row for chunk in chunks for row in chunk]
        return [replace(row, row=index) for index, row in enumerate(rows)]


def predict(config: EngineConfig, model: ModelHandle, limits: EngineLimits, cost: StepCost, sample: RowSample) -> Prediction | None:
    """Run the control plane over the rows with a fake model, and add up what each step costs; None without rows."""
    requests = sample.requests(limits.max_num_seqs)
    if not requests:
        return None
    engine = simulated_engine(config, model, replace(limits, num_blocks=min(limits.num_blocks, _ample(config, limits, requests))))
    simulation = Simulation(engine, cost, RowLengths.of(requests).answers)
    simulation.run(iter(requests))
    return simulation.prediction(sample, requests)


def _ample(config: EngineConfig, limits: EngineLimits, requests: list[Request]) -> int:
    """Blocks of a pool that is never short; a larger one, as of a GPU that is not here, would do nothing more."""
    longest = -(-limits.max_model_len // limits.block_size)
    if not config.paged:
        return limits.max_num_seqs * longest + 1
    every = int((-(-RowLengths.of(requests).per_answer() // limits.block_size)).sum()) + longest
    return every + every // 50 + 2  # more than the scheduler keeps in reserve


def simulated_engine(config: EngineConfig, model: ModelHandle, limits: EngineLimits) -> Engine:
    """An engine of these limits, for whatever device they were computed, that computes nothing and takes no memory."""
    from batchinfer.build import build_engine

    bare = replace(
        config,
        device="cpu",
        dtype="float32",
        quantization="none",
        kv_cache_dtype="auto",
        speculative="off",
        fake_model=True,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=limits.block_size,
        num_kv_blocks=limits.num_blocks - 1,
        kv_cache_memory=None,
    )
    return build_engine(bare, model)


class Simulation:
    """An engine's steps on a clock that is moved by what each of them costs."""

    def __init__(self, engine: Engine, cost: StepCost, answers: np.ndarray) -> None:
        """`answers`: how many each row asks for, int64 [R]."""
        self._engine = engine
        self._cost = cost
        self.now = 0.0
        self._place = np.cumsum(answers) - answers  # of each row's first answer among all answers
        self._admitted = np.full(int(answers.sum()), np.nan)
        self._latest = np.full(int(answers.sum()), np.nan)  # when the answer had its last token
        self._gaps: list[np.ndarray] = []
        self._ttft: list[np.ndarray] = []
        engine.on_step = self._step

    def run(self, requests: Iterator[Request]) -> None:
        """Run every request to its end."""
        for _ in self._engine.run(requests):
            pass

    def prediction(self, sample: RowSample, requests: list[Request]) -> Prediction:
        """What was seen, scaled to the whole input where a part was run."""
        stats = self._engine.stats
        part = int(RowLengths.of(requests).held(shared=True).sum())
        scale = (sample.prompt_tokens + sample.output_tokens) / part
        return Prediction(
            seconds=self.now * scale,
            prompt_tokens=sample.prompt_tokens,
            output_tokens=round(stats.output_tokens * scale) if scale > 1 else stats.output_tokens,
            ttft_ms=Latency.of(np.concatenate([np.empty(0), *self._ttft])),
            itl_ms=Latency.of(np.concatenate([np.empty(0), *self._gaps])),
            prefix_hit_rate=stats.prefix_hit_rate,
            peak_blocks=stats.peak_blocks_used,
            peak_running=stats.peak_running,
            preemptions=round(stats.preemptions * scale),
            steps=round(stats.steps * scale),
            rows=sample.rows,
            rows_simulated=len(requests),
        )

    def _step(self, shape: StepShape) -> None:
        began = self.now
        self.now += self._cost.of(shape)
        who = self._place[shape.rows] + shape.choices
        self._admitted[who[shape.admitted]] = began
        told = who[shape.emitted > 0]
        before = self._latest[told]
        first = np.isnan(before)
        if first.any():
            self._ttft.append(self.now - self._admitted[told[first]])
        self._gaps.append(self.now - before[~first])
        self._latest[told] = self.now
