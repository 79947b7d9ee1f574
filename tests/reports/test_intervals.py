"""Intervals and comparisons: right where the answer is known."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchinfer.errors import InputFileError
from batchinfer.reports.compare import compare_files
from batchinfer.reports.intervals import Ratio, Spread, t_point, times
from batchinfer.reports.summary import report_console


def test_points_of_students_t() -> None:
    assert [t_point(n) for n in (1, 4, 30)] == [12.706, 2.776, 2.042]
    assert [round(t_point(n), 3) for n in (40, 60, 120)] == [2.021, 2.0, 1.98]


def test_the_interval_holds_the_truth_95_times_in_100() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        ratio = Ratio.of_logs(rng.normal(math.log(1.2), 0.05, 5).tolist())
        assert ratio.low is not None
        assert ratio.high is not None
        held += ratio.low <= 1.2 <= ratio.high
    assert 0.935 < held / 2000 < 0.965


def test_one_round_has_no_interval() -> None:
    ratio = Ratio.of_logs([math.log(2)])
    assert (ratio.value, ratio.low, ratio.high, ratio.span(), ratio.differs_from_one) == (pytest.approx(2), None, None, "", False)


def test_ratios_in_words() -> None:
    assert [times(v) for v in (0.5, 9.99, 12.34, 140.4)] == ["0.50x", "9.99x", "12.3x", "140x"]
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)


def shown(first: Path, second: Path, capsys: pytest.CaptureFixture[str]) -> str:
    import sys

    report_console(sys.stdout).print(compare_files(first, second))
    return capsys.readouterr().out


def bench(rate: float, low: float, high: float, **more: Any) -> dict[str, Any]:
    spread = {"median": rate, "low": low, "high": high, "runs": 3}
    return {"throughput": {"output_tokens_per_s": rate}, "output_tokens_per_s_spread": spread, "settings": {"dtype": "bf16"}, **more}


def test_reports_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"
    a.write_text(json.dumps(bench(100, 95, 105)))
    b.write_text(json.dumps(bench(120, 110, 130, settings={"dtype": "float32"})))
    c.write_text(json.dumps(bench(102, 90, 110)))
    text = shown(a, b, capsys)
    assert "dtype: bf16 | float32" in text
    line = next(line for line in text.splitlines() if line.startswith("output tokens/s"))
    assert "1.20x" in line
    assert line.rstrip().endswith("differ")
    assert "within their spread" in shown(a, c, capsys)


def test_ablations_are_compared_by_feature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    feature = {"name": "paged", "concurrency": 64, "ratio": 1.1, "ratio_low": 1.05, "ratio_high": 1.15}
    a.write_text(json.dumps({"features": [feature], "ladder": []}))
    b.write_text(json.dumps({"features": [{**feature, "ratio": 1.3, "ratio_low": 1.2, "ratio_high": 1.4}]}))
    assert "differ" in shown(a, b, capsys)


def test_reports_of_two_kinds_are_refused(tmp_path: Path) -> None:
    a, b, c = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"
    a.write_text(json.dumps(bench(1, 1, 1)))
    b.write_text(json.dumps({"features": []}))
    c.write_text("[")
    with pytest.raises(InputFileError, match="only reports of the same command"):
        compare_files(a, b)
    with pytest.raises(InputFileError, match="not valid JSON"):
        compare_files(a, c)
    with pytest.raises(InputFileError, match="No such file"):
        compare_files(a, tmp_path / "d.json")
