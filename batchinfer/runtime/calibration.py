"""Measures what a step costs on this machine, without the checkpoint's weights, and remembers it.

The decoder, the attention, the head and the sampler are the real ones, with some layers of random weights: enough of
them that a small batch reads its weights from memory, as it does in a run, and not from the processor's caches.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchinfer.attention.base import AttnSpec
from batchinfer.attention.kv_cache import KV_FORMATS, KVCache
from batchinfer.config import cache_root
from batchinfer.core.plan import Drafts, Plan
from batchinfer.core.sequences import SequenceTable
from batchinfer.core.step_cost import StepCost, curve_of
from batchinfer.layers.lm_head import SLICE_WIDTH
from batchinfer.machine import read_machine, usable_cores
from batchinfer.model.assemble import Placement, assemble
from batchinfer.model.config import ModelConfig
from batchinfer.model.footprint import head_bytes, layer_shapes, linear_bytes
from batchinfer.ops.table import Choice
from batchinfer.runtime.batch import RaggedBatchBuilder, StepBatch
from batchinfer.runtime.device import ComputeTarget, choose_attention
from batchinfer.runtime.head import GenerateHead, Shaping
from batchinfer.runtime.runner import EagerRunner
from batchinfer.runtime.sampler import choose_sampler
from batchinfer.version import __version__

CALIBRATION_VERSION = 3
MEASUREMENTS = 3  # starts that measure; one alone may fall into a busy moment
KEPT = 9  # the last measurements, of which the middle one counts
ROUNDS = 3  # in each of them: every point is timed in each round
POINT_SECONDS = 0.008  # for a point in a round
WAITS = 1.05  # how much longer a step takes by the clock than its thread has a processor, on a machine that does nothing else
COLD_BYTES = 36 * 2**20  # of weights: more than most caches hold
MOST_LAYERS = 16
FEW_LAYERS, MANY_TOKENS = 2, 128  # from so many tokens on reading the weights is a small part of the time, and few layers will do
TOKEN_COUNTS = {"cpu": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), "cuda": (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096)}
LOGIT_COUNTS = {"cpu": (1, 4, 16, 64, 256), "cuda": (1, 32, 256)}
SPAN = 64  # tokens of a span from MANY_TOKENS on: such steps are prefill for the most part
DECODING_ROWS, DECODED = 64, 384  # decoding rows, and the tokens before each
CHUNK, CHUNKED = 512, 1024  # tokens of a long prompt's span, and those before it


@dataclass(frozen=True, slots=True)
class Subject:
    """What is calibrated: a model's sizes, and how and where they are computed."""

    model: ModelConfig
    target: ComputeTarget
    spec: AttnSpec
    kv_format: str
    block_size: int


@dataclass(frozen=True, slots=True)
class Point:
    """A batch that is timed: `rows` spans of `queries` tokens after `context` others, through `layers` layers."""

    rows: int
    queries: int
    context: int
    layers: int

    @property
    def tokens(self) -> int:
        """Tokens in the batch."""
        return self.rows * self.queries

    @property
    def pairs(self) -> float:
        """Pairs of a token and one that it attends to, as `StepShape.prefill_attention` counts them."""
        return self.rows * self.queries * (self.context + self.queries / 2)

    def num_blocks(self, block_size: int) -> int:
        """Blocks that each span's sequence holds."""
        return -(-(self.context + self.queries) // block_size)

    def __str__(self) -> str:
        """Its name in the cache file."""
        return f"{self.rows} x {self.queries} after {self.context}, {self.layers} layers"


Times = dict[str, float]
"""Name of a point -> best seconds."""


def step_cost(subject: Subject, again: bool = False) -> StepCost:
    """What a step costs here: measured at the first few starts (a second or two each), and remembered.

    What a run will take is asked, not what the machine can do at its best: where other guests share the processor, it is
    half as fast for minutes on end, and the middle one of several measurements tells more than their best. With `again`
    there is always one more.
    """
    path, key, points = _cache_file(), _key(subject), Points.of(subject)
    known = _complete(points, _read(path).get(key, []))
    if len(known) < MEASUREMENTS or again:
        known = _complete(points, _remember(path, key, measure(subject, points)))
    return points.fit(subject, _middle(known))


def try_step_cost(subject: Subject) -> StepCost | None:
    """What earlier starts measured, None if none did."""
    points = Points.of(subject)
    known = _complete(points, _read(_cache_file()).get(_key(subject), []))
    return points.fit(subject, _middle(known)) if known else None


def _complete(points: Points, measurements: list[Times]) -> list[Times]:
    return [times for times in measurements if points.all_in(times)]


def _middle(measurements: list[Times]) -> Times:
    """A whole measurement, because its points belong together: the one in the middle by the sum of its times, the slower of two."""
    return sorted(measurements, key=lambda times: sum(times.values()))[len(measurements) // 2]


@dataclass(frozen=True, slots=True)
class Points:
    """All that is timed for a subject."""

    few: Point  # one token through half of the layers
    by_tokens: tuple[Point, ...]
    decode: Point
    prefill: Point
    by_logits: tuple[int, ...]

    @classmethod
    def of(cls, subject: Subject) -> Points:
        """The points for this model on this device."""
        most = num_layers(subject)
        few = max(1, min(FEW_LAYERS, most))

        def by_tokens(count: int) -> Point:
            return Point(count // SPAN, SPAN, 0, few) if count >= MANY_TOKENS else Point(count, 1, 0, most)

        device = subject.target.device.type
        return cls(
            few=Point(1, 1, 0, max(1, most // 2)),
            by_tokens=tuple(by_tokens(count) for count in TOKEN_COUNTS[device]),
            decode=Point(DECODING_ROWS, 1, DECODED, most),
            prefill=Point(1, CHUNK, CHUNKED, few),
            by_logits=LOGIT_COUNTS[device],
        )

    @property
    def forward(self) -> tuple[Point, ...]:
        """Those that go through layers."""
        return (self.few, *self.by_tokens, self.decode, self.prefill)

    def all_in(self, times: Times) -> bool:
        """Whether every point was timed."""
        return all(name in times for name in (*map(str, self.forward), *map(_logits_name, self.by_logits)))

    def fit(self, subject: Subject, times: Times) -> StepCost:
        """From the points' times to those of whole steps."""
        all_layers = subject.model.num_layers
        first = self.by_tokens[0]
        a_layer = (times[str(first)] - times[str(self.few)]) / max(1, first.layers - self.few.layers)
        constant = (
            min(max(0.0, times[str(first)] - a_layer * first.layers), times[str(first)] / 2) if first.layers > self.few.layers else 0.0
        )

        def layers_of(point: Point) -> float:
            return (times[str(point)] - constant) / point.layers * all_layers

        curve = curve_of({point.tokens: layers_of(point) for point in self.by_tokens})
        without = StepCost(curve, ((1.0, 0.0),), 0.0, 0.0, 0.0)
        read = (layers_of(self.decode) - without.seconds(self.decode.tokens, 0)) / (self.decode.rows * self.decode.context)
        spans = next(point for point in self.by_tokens if point.tokens == self.prefill.tokens)
        pair = (layers_of(self.prefill) - layers_of(spans)) / (self.prefill.pairs - spans.pairs)
        head = curve_of({count: times[_logits_name(count)] * _head_share(subject) for count in self.by_logits})
        return StepCost(curve, head, float(max(read, 0.0)), max(pair, 0.0), constant)


def num_layers(subject: Subject) -> int:
    """Layers that are built: whose weights do not fit into the processor's caches together; at least two."""
    item = subject.target.dtype.itemsize
    size = sum(linear_bytes(shape, subject.target.linear.name, item) for shape in layer_shapes(subject.model))
    return min(subject.model.num_layers, MOST_LAYERS, max(FEW_LAYERS, -(-COLD_BYTES // size)))


def head_ids(subject: Subject) -> int:
    """Entries of the vocabulary that are built: whole slices of the head, that do not fit into the caches together."""
    model = subject.model
    size = head_bytes((SLICE_WIDTH, model.hidden_size), subject.target.linear.name, subject.target.dtype.itemsize)
    return min(model.vocab_size, SLICE_WIDTH * -(-COLD_BYTES // size))


def measure(subject: Subject, points: Points) -> Times:
    """Time every point, in rounds, so that a busy moment of the machine does not meet all tries of one."""
    bench = _Bench(subject, points)
    tries = [_Tries(str(point), bench.forward(point)) for point in points.forward]
    tries += [_Tries(_logits_name(count), bench.head(count)) for count in points.by_logits]
    clock = _device_clock if subject.target.device.type == "cuda" else _processor_clock
    for point in tries:  # once for buffers that are made at the first call
        point.work()
    for _ in range(ROUNDS):
        for point in tries:
            end = time.perf_counter() + POINT_SECONDS
            while True:
                point.best = min(point.best, clock(point.work))
                if time.perf_counter() >= end:
                    break
    return {point.name: point.best for point in tries}


@dataclass(slots=True)
class _Tries:
    """The tries of one point."""

    name: str
    work: Callable[[], object]
    best: float = float("inf")  # seconds


def _device_clock(work: Callable[[], object]) -> float:
    """Seconds until the device is done."""
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _processor_clock(work: Callable[[], object]) -> float:
    """Seconds that the work takes on an idle machine, also when this one is not.

    The calling thread does alone what is not parallel, and takes part in what is; work items that are claimed one by
    one may fall to the others meanwhile. The processor time that it has, or that each thread has on the average if
    that is more, is nearly the time of an undisturbed run, however long they wait for a processor. With four busy
    processes on two cores, repeated measurements agree within a few per cent; by the clock they differ by half.
    """
    start, own, every = time.perf_counter(), time.thread_time(), time.process_time()
    work()
    own, every = time.thread_time() - own, time.process_time() - every
    return min(time.perf_counter() - start, WAITS * max(own, every / torch.get_num_threads()))


class _Bench:
    """The engine's data plane around random weights."""

    def __init__(self, subject: Subject, points: Points) -> None:
        target, size = subject.target, subject.block_size
        self._depth, self._block_size = num_layers(subject), size
        model = replace(subject.model, num_layers=self._depth, vocab_size=head_ids(subject), tied_head=True)
        batches = (*points.forward, *(Point(count, 1, 0, 1) for count in points.by_logits))
        longest = max(point.context + point.queries for point in batches)
        place = Placement(target.dtype, target.device, target.linear, target.ops)
        self._decoder, lm_head = assemble(model, _random_weights(model, target), place, longest)
        self._table = SequenceTable(max(point.rows for point in batches), longest, -(-longest // size))
        blocks = 1 + max(point.rows * point.num_blocks(size) for point in batches)
        self._kv = KVCache(subject.spec, self._depth, blocks, size, KV_FORMATS[subject.kv_format], target.device)
        self._blocks = 1 + np.random.default_rng(0).permutation(blocks - 1)
        for layer in self._kv.layers:  # numbers near 0.01 in every format; pages that were never written would all be the same one
            layer.k.fill_(0x3C)
            layer.v.fill_(0x3C)
        self._attention, _ = choose_attention(self._kv, target)
        self._builder = RaggedBatchBuilder(self._table, size, target.device)
        sampler, _ = choose_sampler(target, model.vocab_size)
        self._head = GenerateHead(lm_head, self._table, model.vocab_size, Shaping(), sampler)

    def forward(self, point: Point) -> Callable[[], object]:
        """One forward pass; if it needs a part of the layers only, another part each time."""
        decoder = self._decoder
        parts = [decoder.part(first, first + point.layers) for first in range(0, self._depth - point.layers + 1, point.layers)]
        runners = cycle([EagerRunner(part, self._attention) for part in parts])
        return lambda: next(runners).forward(self._batch(point))

    def head(self, count: int) -> Callable[[], object]:
        """The head and the sampler on `count` rows, greedy."""
        batch = self._batch(Point(count, 1, 0, 1))
        hidden = EagerRunner(self._decoder.part(0, 1), self._attention).forward(batch)
        return lambda: self._head.decide(hidden, batch)

    def _batch(self, point: Point) -> StepBatch:
        """A batch of this shape; every row has blocks of its own, here and there in the pool, as they lie in a run."""
        table, rows, width = self._table, point.rows, point.num_blocks(self._block_size)
        slots = np.arange(rows, dtype=np.int32)
        table.block_table[:rows, :width] = self._blocks[: rows * width].reshape(rows, width)
        table.num_tokens[:rows] = point.context + point.queries
        start, count = np.full(rows, point.context, np.int32), np.full(rows, point.queries, np.int32)
        return self._builder.build(Plan(slots, start, count, np.ones(rows, bool)), Drafts.none(rows))


def _random_weights(model: ModelConfig, target: ComputeTarget) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model under its name; the same numbers again and again, each time in memory of their own."""
    shapes = model.tensor_shapes()
    most = max(int(np.prod(shape)) for shape in shapes.values())
    numbers = torch.randn(most, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(target.linear.weight_dtype)
    for name, shape in shapes.items():
        yield name, numbers[: int(np.prod(shape))].clone().view(shape)


def _head_share(subject: Subject) -> float:
    return subject.model.vocab_size / head_ids(subject)


def _logits_name(count: int) -> str:
    return f"head of {count}"


def _cache_file() -> Path:
    return cache_root() / "step-costs.json"


def _key(subject: Subject) -> str:
    """All that decides how long a step takes."""
    target, model = subject.target, subject.model
    device = torch.cuda.get_device_name() if target.device.type == "cuda" else read_machine().cpu
    sizes = (model.hidden_size, model.intermediate_size, model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim)
    kernels = [f"{choice.operation}={choice.chosen}" for choice in _kernels(subject)]
    facts = (CALIBRATION_VERSION, __version__, torch.__version__, device, usable_cores(), torch.get_num_threads(), *kernels)
    own = ("x".join(map(str, sizes)), model.vocab_size, target.linear.name, subject.kv_format, subject.block_size)
    return "|".join(map(str, (*facts, *own)))


def _kernels(subject: Subject) -> list[Choice]:
    """What computes each operation."""
    probe = KVCache(subject.spec, 1, 2, subject.block_size, KV_FORMATS[subject.kv_format], subject.target.device)
    _, attention = choose_attention(probe, subject.target)
    _, sampling = choose_sampler(subject.target, 1)
    return [*subject.target.choices, attention, sampling, Choice("native", subject.target.native.target, "")]


def _read(path: Path) -> dict[str, list[Times]]:
    """Key -> the last measurements in their order; what cannot be read was never measured."""
    try:
        saved = json.loads(path.read_text())
        return {key: [_checked(times) for times in entry["measurements"]] for key, entry in saved.items()}
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return {}


def _checked(entry: dict[str, Any]) -> Times:
    times = {str(name): float(seconds) for name, seconds in entry.items()}
    if not all(0 < seconds < float("inf") for seconds in times.values()):
        raise ValueError("a time that no clock shows")
    return times


def _remember(path: Path, key: str, found: Times) -> list[Times]:
    """Add a measurement to the file, as it is now that the measurement is done; all that are kept."""
    known = _read(path)
    known[key] = [*known.get(key, []), found][-KEPT:]
    scratch = path.with_name(f"{path.name}.{os.getpid()}.{time.time_ns()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {name: {"measurements": measurements} for name, measurements in known.items()}
        scratch.write_text(json.dumps(record, indent=1))
        scratch.replace(path)
    except OSError:
        pass  # a cache folder that cannot be written costs a second or two at each start, nothing else
    return known[key]
