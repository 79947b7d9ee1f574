"""Pages: complete in themselves, with the numbers of the report, and refused in time where plotly is missing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from batchinfer.reports.charts import charts_of
from batchinfer.reports.html_page import html_page
from tests.cli.conftest import Cli
from tests.reports.test_ablation import Machine, ablated
from tests.reports.test_sweep import swept


def without_library(page: str) -> str:
    """The page without plotly's own code."""
    from plotly.offline import get_plotlyjs

    return page.replace(get_plotlyjs(), "")


def test_an_ablations_page_holds_bars_and_ladder() -> None:
    report = ablated(Machine({"quantization": 1.5, "graphs": 0.8}, noise=0.02), counts=(1, 64), climb=True).as_dict()
    charts = charts_of(report)
    assert [chart.title.split(",")[0] for chart in charts] == ["What each feature is worth"] * 2 + ["From the naive loop upwards"] * 2
    points = charts[0].figure.data[1]
    assert len(points.y) == 12
    assert list(points.x) == sorted(points.x)
    assert all(value >= 0 for value in points.error_x.array)
    page = without_library(html_page("What <each> feature", report))
    assert "What &lt;each&gt; feature" in page
    for words in ("quantization", "0.80x", "prefers-color-scheme", "id='chart3'", "Everything, as JSON"):
        assert words in page
    assert "https://" not in page.replace("https://plotly", "")
    assert "src=" not in page
    assert page.count("</script>") == 2


def test_a_sweeps_page_holds_its_curve() -> None:
    report = swept([200, 40, 6]).as_dict()
    completed, speed = charts_of(report)
    assert list(completed.figure.data[0].y) == [pool["completed"] for pool in report["pools"]]
    assert list(speed.figure.data[0].y) == [pool["output_tokens_per_s"] for pool in report["pools"]]
    assert "too small for" in without_library(html_page("sweep", report))


@pytest.mark.parametrize("command", ["bench", "sweep-kv", "ablate"])
def test_commands_write_pages(cli: Cli, tiny_folder: Path, tmp_path: Path, command: str) -> None:
    path = tmp_path / "page.html"
    more = {
        "bench": ["--repeats", "2"],
        "ablate": ["--features", "paged", "--repeats", "1", "--budget-s", "10"],
        "sweep-kv": ["--blocks", "40"],
    }
    said = cli(command, "-m", tiny_folder, "--fake-model", "--rows", "4", "--html", path, "-q", *more[command])
    assert said.code == 0, said.err
    page = path.read_text()
    assert page.startswith("<!doctype html>")
    assert "Plotly.react" in page


def test_a_missing_library_is_said_before_anything_is_measured(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = importlib.util.find_spec

    def find(name: str, *rest: Any) -> Any:
        return None if name == "plotly" else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    for command in ("bench", "sweep-kv", "ablate"):
        said = cli(command, "-m", "no-such-model", "--html", tmp_path / "x.html")
        assert said.code == 2
        assert "pip install 'batchinfer[html]'" in said.err


def test_a_report_without_results_still_makes_a_page() -> None:
    report = ablated(Machine(interrupt_at=0)).as_dict()
    assert json.dumps(report)
    assert "Stopped early" in html_page("nothing", report)
