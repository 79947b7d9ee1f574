"""Builds a job's engine together with the meters of its physical limit and of its expected time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from batchinfer.reports.limit import ITEM_BYTES, LimitMeter, ModelDims
from batchinfer.reports.predict import StepForecast
from batchinfer.reports.rates import Arithmetic, machine_rates
from batchinfer.stopwatch import NO_STOPWATCH, NoStopwatch, StageWatch

if TYPE_CHECKING:
    from batchinfer.build import JobNeed, ModelHandle, WeightShelf
    from batchinfer.config import EngineConfig
    from batchinfer.core.stats import StepShape
    from batchinfer.core.step_cost import StepCost
    from batchinfer.engine import Engine
    from batchinfer.job import JobReport
    from batchinfer.reports.summary import RunSummary


class RunMeter:
    """Hands the job its engine, knows from then on what a step costs at least, and writes the report's keys."""

    def __init__(
        self, measure_again: bool = False, shelf: WeightShelf | None = None, watch: StageWatch | NoStopwatch = NO_STOPWATCH
    ) -> None:
        self.measure_again = measure_again
        self.watch = watch
        self._shelf = shelf
        self.meter: LimitMeter | None = None
        self.forecast: StepForecast | None = None
        self.load_seconds = 0.0

    def open_model(self, config: EngineConfig) -> ModelHandle:
        """The job's model before its weights."""
        from batchinfer.build import open_model

        return open_model(config, self.watch)

    def build_engine(self, config: EngineConfig, model: ModelHandle, need: JobNeed | None = None) -> Engine:
        """The engine, with the machine's rates at hand before its first step."""
        from batchinfer.build import build_engine

        with self.watch.stage("cost of steps"):
            cost = self._step_cost(config, model)
        start = time.perf_counter()
        engine = build_engine(config, model, need, self._shelf, self.watch)
        self.load_seconds = time.perf_counter() - start
        with self.watch.stage("rates of the machine"):
            self.meter = None if config.fake_model else meter_for(engine, model, self.measure_again)
        self.forecast = None if cost is None else StepForecast(cost)
        return engine

    def _step_cost(self, config: EngineConfig, model: ModelHandle) -> StepCost | None:
        """What a step costs here, if it is known: a job does not wait for it to be measured, a bench does.

        None with drafts, since a step's shape does not tell how many were tried in vain.
        """
        from batchinfer.build import step_cost, try_step_cost

        if config.fake_model or config.speculative != "off":
            return None
        return step_cost(config, model) if self.measure_again else try_step_cost(config, model, self.watch)

    def step(self, shape: StepShape) -> None:
        """Count one step."""
        if self.meter is not None:
            self.meter(shape)
        if self.forecast is not None:
            self.forecast(shape)

    def summary(self, report: JobReport) -> RunSummary:
        """The report, judged by the steps that were seen."""
        from batchinfer.reports.summary import RunSummary

        return RunSummary.of(report, self.meter, self.forecast, self.watch.stages)

    def report_json(self, report: JobReport) -> dict[str, Any]:
        """The stable keys of `OUTPUT.report.json`."""
        return self.summary(report).as_dict()


def meter_for(engine: Engine, model: ModelHandle, measure_again: bool) -> LimitMeter | None:
    """A meter for an engine's steps; None where its arithmetic is not one that the limit is known for."""
    arithmetic, device = arithmetic_of(engine.settings), str(engine.settings.get("device", "cpu"))
    if arithmetic.dtype not in ITEM_BYTES or device not in ("cpu", "cuda"):
        return None
    dims = ModelDims.of(model.config, arithmetic, engine.limits.kv_bytes_per_token)
    return LimitMeter(dims, machine_rates(arithmetic, device, measure_again))


def arithmetic_of(settings: Mapping[str, object]) -> Arithmetic:
    """The formats that an engine's settings came out as."""
    return Arithmetic(*(str(settings.get(name)) for name in ("dtype", "quantization", "kv_cache_dtype")))
