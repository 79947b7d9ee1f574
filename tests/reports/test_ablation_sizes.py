"""What an ablation runs in the time that it has."""

from __future__ import annotations

import numpy as np
import pytest

from batchinfer.core.request import Request, SamplingParams
from batchinfer.reports.ablation_plan import Pilot, choose_sizes
from batchinfer.reports.variants import FEATURES, baseline
from batchinfer.reports.workload import Workload

ROWS = 64


@pytest.mark.parametrize(("seconds", "wide"), [(10_000.0, True), (250.0, True), (60.0, True), (30.0, True), (10.0, False)])
def test_rows_that_run_at_once_go_last(seconds: float, wide: bool) -> None:
    """With little time answers get shorter and rounds fewer before there are fewer rows than run beside each other."""
    requests = [Request(i, np.arange(10, dtype=np.int32), SamplingParams(max_tokens=200, ignore_eos=True)) for i in range(256)]
    everything = baseline(FEATURES, ROWS)
    pilot = Pilot(0.0, 0.05, 0.005, ROWS, 0.0, {everything.name: 1.0})
    sizes = choose_sizes([everything], Workload("of one length", requests), pilot, seconds)
    assert (len(sizes.whole.requests) >= ROWS) == wide
    assert sizes.round_seconds * sizes.rounds <= seconds
