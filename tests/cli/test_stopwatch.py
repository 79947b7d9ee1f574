"""The stopwatch of `--timings`: stages add up to the process's age, inner ones are taken from outer ones."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from batchinfer.layers.row_sizes import _remembered
from batchinfer.reports.stage_table import stage_table
from batchinfer.stopwatch import BEFORE, NO_STOPWATCH, OTHER, StageTime, StageWatch, choose_stopwatch
from tests.cli.conftest import Cli


class Hands:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def hands() -> Hands:
    return Hands()


def watch_of(hands: Hands) -> StageWatch:
    return StageWatch(age=lambda: 2.0, clock=hands)


def told(watch: StageWatch) -> dict[tuple[str, bool], float]:
    return {(stage.name, stage.startup): round(stage.seconds, 6) for stage in watch.stages if stage.seconds}


def test_what_runs_inside_a_stage_is_taken_from_it(hands: Hands) -> None:
    watch = watch_of(hands)
    hands.passes(1)
    with watch.stage("outer"):
        hands.passes(2)
        with watch.stage("inner"):
            hands.passes(4)
        hands.passes(8)
    hands.passes(16)
    with watch.stage("outer"):
        hands.passes(32)
        assert told(watch) == {(BEFORE, True): 2, (OTHER, True): 17, ("outer", True): 42, ("inner", True): 4}
    assert sum(stage.seconds for stage in watch.stages) == pytest.approx(2 + hands.now - 100)
    assert [(stage.name, stage.began) for stage in watch.stages] == [(BEFORE, 0), (OTHER, 2), ("outer", 3), ("inner", 5)]


def test_a_stage_that_fails_ends(hands: Hands) -> None:
    watch = watch_of(hands)
    broken = watch.stage("broken")
    broken.__enter__()
    hands.passes(1)
    assert not broken.__exit__(KeyError, KeyError(), None)
    hands.passes(2)
    assert told(watch) == {(BEFORE, True): 2, ("broken", True): 1, (OTHER, True): 2}


def test_items_are_charged_as_they_come_and_the_first_step_ends_the_start(hands: Hands) -> None:
    watch = watch_of(hands)

    def rows() -> Iterator[int]:
        for row in range(3):
            hands.passes(1)
            yield row

    def engine(source: Iterator[int]) -> Iterator[int]:
        for row in source:
            hands.passes(10)
            watch.stepped()
            yield row

    for _ in watch.each("engine", engine(iter(watch.each("read", rows())))):
        with watch.stage("store"):
            hands.passes(100)
    assert told(watch) == {
        (BEFORE, True): 2, ("read", True): 1, ("first step", True): 10,
        ("read", False): 2, ("engine", False): 20, ("store", False): 300,
    }  # fmt: skip


def test_other_threads_change_nothing(hands: Hands) -> None:
    watch = watch_of(hands)

    def work() -> None:
        with watch.stage("elsewhere"):
            hands.passes(1)

    thread = threading.Thread(target=work)
    with watch.stage("here"):
        thread.start()
        thread.join()
    assert told(watch) == {(BEFORE, True): 2, ("here", True): 1}


def test_imports_are_stages_of_their_packages(tmp_path: Path) -> None:
    """In a process of its own: here everything is imported already."""
    script = (
        "import sys, time\n"
        "from batchinfer.stopwatch import StageWatch\n"
        "with StageWatch() as watch:\n"
        "    before = list(sys.meta_path)\n"
        "    import jinja2, llguidance\n"
        "    assert jinja2.Template('{{ 1 }}').render() == '1'\n"
        "assert len(sys.meta_path) == len(before) - 1\n"
        "times = {stage.name: stage.seconds for stage in watch.stages}\n"
        "assert times['import jinja2'] > 0.001 and 'import llguidance' in times and 'import torch' not in times, times\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])


def test_nobody_pays_who_does_not_ask() -> None:
    assert choose_stopwatch(False) is NO_STOPWATCH
    items = [1, 2]
    assert NO_STOPWATCH.each("engine", items) is items
    with NO_STOPWATCH as watch, watch.stage("anything"):
        watch.say("anything", "done")
        watch.stepped()
    assert not NO_STOPWATCH.stages


def test_the_table_sums_each_block_and_folds_what_is_short() -> None:
    stages = [
        StageTime("import torch", True, 0.1, 0.6),
        StageTime("blink", True, 0.7, 0.0004),
        StageTime("native library", True, 0.7, 0.2, "built"),
        StageTime("engine", False, 0.9, 0.2),
    ]
    console = Console(file=io.StringIO(), width=100)
    console.print(stage_table(stages))
    lines = [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert ["import", "torch", "100", "600", "60.0%"] in lines
    assert ["native", "library", "700", "200", "20.0%", "built"] in lines
    assert ["1", "shorter", "0", "0.0%"] in lines
    assert [line[-2:] for line in lines if "after" in line] == [["200", "20.0%"]]
    assert not any("blink" in line for line in lines)


def test_a_run_tells_its_stages(cli: Cli, tiny_folder: Path, tmp_path: Path) -> None:
    rows, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows.write_text('{"prompt": "hello", "max_tokens": 3}\n' * 3)
    _remembered.cache_clear()  # what earlier tests left in this process says nothing of this cache
    said = cli("run", rows, "-m", tiny_folder, "-o", output, "--timings")
    assert said.code == 0, said.err
    assert "start, up to the end of the first step" in said.err
    report = json.loads(Path(f"{output}.report.json").read_text())
    stages = {(stage["name"], stage["startup"]): stage for stage in report["timings"]}
    for name in ("find the model", "tokenizer", "row sizes", "read the weights", "pack the weights", "KV pool", "self-test", "first step"):
        assert (name, True) in stages
    assert stages["engine", False]["seconds"] > 0
    assert stages["self-test", True]["detail"] in ("measured", "remembered")
    assert sum(stage["seconds"] for stage in report["timings"]) == pytest.approx(report["seconds"]["wall"], abs=1.0)

    _remembered.cache_clear()  # as a process of its own would begin
    assert cli("run", rows, "-m", tiny_folder, "-o", output, "--overwrite", "--timings").code == 0
    again = {stage["name"]: stage["detail"] for stage in json.loads(Path(f"{output}.report.json").read_text())["timings"]}
    assert again["self-test"] == "remembered"
    assert again["row sizes"] == "remembered"

    said = cli("run", rows, "-m", tiny_folder, "-o", output, "--overwrite")
    assert "first step" not in said.err
    assert json.loads(Path(f"{output}.report.json").read_text())["timings"] == []
