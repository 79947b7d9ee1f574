"""Small conveniences to build real engines in tests, and to run rows through them with every invariant checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchinfer.build import JobNeed, ModelHandle, build_engine, open_model
from batchinfer.config import EngineConfig
from batchinfer.core.request import Request, Result
from batchinfer.engine import Engine
from batchinfer.runtime.head import GenerateHead
from tests.fakes import Optimist


def open_tiny(folder: Path, **options: Any) -> ModelHandle:
    return open_model(EngineConfig(model=str(folder), device="cpu", **options))


def build(model: ModelHandle, *, optimistic: bool = False, **options: Any) -> Engine:
    """`optimistic` admits too many rows for the pool, so that it overflows and rows are preempted."""
    config = EngineConfig(model=str(model.files.path), device="cpu", **options)
    engine = build_engine(config, model, JobNeed(20_000))
    if optimistic:
        engine.scheduler.forecast = Optimist()
    return engine


def run_all(engine: Engine, rows: list[Request]) -> dict[int, Result]:
    """Results by row; invariants hold after every step, and nothing is left behind."""
    for row in rows:
        engine.add(row)
    results: dict[int, Result] = {}
    while engine.num_unfinished:
        for result in engine.step():
            assert result.row not in results
            results[result.row] = result
        engine.memory.check()
    assert engine.memory.pool.num_used == 0
    return results


def generate_head(engine: Engine) -> GenerateHead:
    """The head that samples, whatever stands before it."""
    head: Any = engine.head
    while not isinstance(head, GenerateHead):
        head = head._inner
    return head


class RecordingHead:
    """Stands before the real head and keeps the logits of every sampled row, by (slot's sequence row, position)."""

    def __init__(self, engine: Engine) -> None:
        self._inner = engine.head
        self._lm_head = generate_head(engine).lm_head
        self._table = engine.memory.table
        self.logits: dict[tuple[int, int], torch.Tensor] = {}
        engine.head = self

    def decide(self, hidden: torch.Tensor, batch: Any) -> Any:
        logits = self._lm_head.logits(hidden)
        for slot, place, row in zip(batch.sampling_slots.tolist(), batch.fill_positions.tolist(), logits, strict=True):
            seq = self._table.sequences[slot]
            assert seq is not None
            self.logits[seq.request.row, place] = row
        return self._inner.decide(hidden, batch)


def ids(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)
