"""The calibration measures the real parts, takes the middle of what it measured, and survives whatever happens to its file."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchinfer.build import ModelHandle, step_cost, try_step_cost
from batchinfer.config import EngineConfig
from batchinfer.runtime import calibration
from tests.engine.engines import open_tiny
from tests.oracle.tiny_models import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelHandle:
    return open_tiny(write_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of an empty cache; the native library, which is built once per machine, stays at hand."""
    monkeypatch.setattr(calibration, "cache_root", lambda: tmp_path)
    monkeypatch.setattr(calibration, "POINT_SECONDS", 0.0)
    return tmp_path / "step-costs.json"


CONFIG = EngineConfig(device="cpu", dtype="float32")


def entries(place: Path) -> list[dict[str, Any]]:
    return list(json.loads(place.read_text()).values())


def test_a_measured_cost_is_remembered(model: ModelHandle, place: Path) -> None:
    assert try_step_cost(CONFIG, model) is None
    cost = step_cost(CONFIG, model)
    assert cost.seconds(8, 8) > cost.seconds(0, 0) >= 0
    assert cost.seconds(512, 256) > cost.seconds(1, 1)
    again = try_step_cost(CONFIG, model)
    assert again is not None
    assert again.as_dict() == cost.as_dict()


def test_some_starts_measure_and_the_middle_measurement_counts(model: ModelHandle, place: Path) -> None:
    first = step_cost(CONFIG, model)
    (entry,) = entries(place)
    (times,) = entry["measurements"]

    def known(*factors: float) -> None:
        measured = [{name: seconds * factor for name, seconds in times.items()} for factor in factors]
        place.write_text(json.dumps({key: {"measurements": measured} for key in json.loads(place.read_text())}))

    for factors, middle in (((1, 8, 2), 2), ((5, 1, 2, 8, 9), 5), ((1, 3, 2, 9, 8, 7, 6, 5, 4), 5), ((1, 1, 1, 1e-3), 1)):
        known(*factors)
        cost = step_cost(CONFIG, model)
        assert cost.seconds(64, 64, 4096.0, 0.0) == pytest.approx(middle * first.seconds(64, 64, 4096.0, 0.0)), factors
    known(1e6)  # a start in a moment when the machine hardly ran at all
    for _ in range(calibration.MEASUREMENTS + 2):
        step_cost(CONFIG, model)
    assert len(entries(place)[0]["measurements"]) == calibration.MEASUREMENTS
    assert step_cost(CONFIG, model).seconds(64, 64) < 1e3 * first.seconds(64, 64)
    step_cost(CONFIG, model, again=True)
    assert len(entries(place)[0]["measurements"]) == calibration.MEASUREMENTS + 1
    for _ in range(calibration.KEPT):
        step_cost(CONFIG, model, again=True)
    assert len(entries(place)[0]["measurements"]) == calibration.KEPT


@pytest.mark.parametrize(
    "rubbish",
    ["", "{", "[]", "null", '{"a": 1}', '{"a": {"times_measured": 3, "seconds": {"x": 1}}}', '{"a": {"measurements": [{"x": -1}]}}'],
)
def test_a_file_that_cannot_be_read_is_measured_again(model: ModelHandle, place: Path, rubbish: str) -> None:
    place.write_text(rubbish)
    assert try_step_cost(CONFIG, model) is None
    step_cost(CONFIG, model)
    assert try_step_cost(CONFIG, model) is not None


def test_other_arithmetic_is_another_calibration(model: ModelHandle, place: Path) -> None:
    step_cost(CONFIG, model)
    for other in (replace(CONFIG, kv_cache_dtype="int8"), replace(CONFIG, block_size=16)):
        assert try_step_cost(other, model) is None
    wider = replace(model, config=replace(model.config, num_layers=model.config.num_layers + 1))
    assert try_step_cost(CONFIG, wider) is None
    step_cost(replace(CONFIG, kv_cache_dtype="int8"), model)
    assert len(entries(place)) == 2
    assert try_step_cost(CONFIG, model) is not None


def test_writers_at_once_leave_a_whole_file(place: Path) -> None:
    """The last one wins, as with any file; what is read is never half written."""
    times = {f"point {i}": 0.001 * (i + 1) for i in range(50)}
    broken: list[str] = []

    def write(name: str) -> None:
        for _ in range(20):
            calibration._remember(place, name, times)
            if not calibration._read(place):
                broken.append(name)

    threads = [threading.Thread(target=write, args=(f"writer {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not broken
    assert all(entry == times for entries in calibration._read(place).values() for entry in entries)
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_a_cache_that_cannot_be_written_costs_only_time(model: ModelHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(calibration, "cache_root", lambda: tmp_path / "file")
    monkeypatch.setattr(calibration, "POINT_SECONDS", 0.0)
    assert step_cost(CONFIG, model).seconds(1, 1) > 0
