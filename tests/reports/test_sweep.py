"""The sweep over KV pools: a budget of steps, requests that can never fit, and the smallest pool that is enough."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from batchinfer.core.request import Request, SamplingParams
from batchinfer.reports.agreement import Agreement
from batchinfer.reports.provenance import Provenance
from batchinfer.reports.sweep import Pool, SweepReport, at_equal_bytes, blocks_for, pool_sizes, sweep
from batchinfer.reports.sweep_table import sweep_picture
from batchinfer.reports.workload import Workload
from tests.cli.conftest import Cli
from tests.fakes import Setup, make_engine

ROWS = Workload(
    "rows", [Request(i, np.arange(4 + i, dtype=np.int32) % 26, SamplingParams(max_tokens=10 + i, ignore_eos=True)) for i in range(12)]
)


def swept(sizes: list[int], workload: Workload = ROWS) -> SweepReport:
    pools = [Pool(blocks, 4, "bf16", 100) for blocks in sizes]
    report = SweepReport(Provenance.of("fake", workload, 0))
    sweep(report, pools, workload, lambda pool: make_engine(Setup(blocks=pool.blocks + 1, max_num_seqs=16)), lambda line: None)
    return report


def test_small_pools_complete_fewer_requests_within_the_budget() -> None:
    report = swept([200, 40, 20, 12])
    results = report.of_dtype("bf16")
    assert [r.pool.blocks for r in results] == [12, 20, 40, 200]
    completed = [r.completed for r in results]
    assert completed == sorted(completed)
    assert completed[0] < completed[-1] == 12
    assert all(r.steps <= report.step_budget for r in results)
    assert results[-1].steps == report.step_budget
    best = report.smallest_complete("bf16")
    assert best is not None
    assert best.completed == 12
    # What completes is the same in every pool.
    assert all(r.agreement is not None and r.agreement.share == 1.0 for r in results)


def test_a_pool_too_small_for_a_request_says_so_and_ends() -> None:
    report = swept([200, 6, 2])
    small, smaller = report.of_dtype("bf16")[1], report.of_dtype("bf16")[0]
    assert 0 < small.never_fit < 12
    assert small.completed <= 12 - small.never_fit
    assert (smaller.never_fit, smaller.completed, smaller.steps) == (12, 0, 0)
    assert "too small for 12 requests of 12: the longest needs 36 tokens" in smaller.note


def test_ctrl_c_keeps_what_was_measured() -> None:
    report = SweepReport(Provenance.of("fake", ROWS, 0))
    told = 0

    def tell(line: str) -> None:
        nonlocal told
        told += 1
        if line.startswith("pool 2"):
            raise KeyboardInterrupt

    sweep(report, [Pool(200, 4, "bf16", 1), Pool(20, 4, "bf16", 1)], ROWS, lambda pool: make_engine(Setup(blocks=pool.blocks + 1)), tell)
    assert report.interrupted
    assert len(report.results) == 1


@pytest.mark.parametrize("width", [80, 160])
def test_the_table_fits(width: int) -> None:
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(sweep_picture(swept([200, 40, 6])))
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for words in ("completed", "preemp", "◂", "too small for", "requests stop fitting at", "160"):
        assert words in text


def test_sizes_follow_the_workload_where_the_default_says_nothing() -> None:
    big = Workload("big", [Request(i, np.zeros(300, np.int32), SamplingParams(max_tokens=100)) for i in range(100)])
    assert pool_sizes(big, 100) == ([4096, 8192, 16_384, 32_768], "the default")
    sizes, why = pool_sizes(ROWS, 100)
    assert sizes[-1] == sum(ROWS.lengths)
    assert "fitted to the workload" in why
    assert [blocks_for(n, 16) for n in (1, 33, 64)] == [2, 3, 4]
    assert [p.blocks for p in at_equal_bytes([Pool(100, 16, "bf16", 200), Pool(50, 16, "bf16", 200)], "int8", 110)] == [181, 90]


def test_agreement_counts_until_the_first_difference() -> None:
    def ids(*values: int) -> np.ndarray:
        return np.array(values, np.int32)

    found = Agreement.of({0: ids(1, 2, 3), 1: ids(1, 2, 3), 2: ids(5)}, {0: ids(1, 2, 3), 1: ids(1, 9, 3), 3: ids(5)})
    assert (found.rows, found.identical, found.share, found.until_difference) == (2, 1, pytest.approx(4 / 6), 1.0)
    assert Agreement.of({0: ids(1, 2)}, {0: ids(1, 2, 3)}).until_difference == 2.0
    assert Agreement.of({}, {}).as_dict()["token_agreement"] is None


KEYS = {"tokens", "blocks", "kv_dtype", "completed", "requests", "output_tokens_per_s", "preemptions", "recomputed_tokens"}


def test_the_command_writes_its_keys(cli: Cli, tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    said = cli(
        "sweep-kv",
        "-m",
        tiny_folder,
        "--rows",
        "6",
        "--kv-dtypes",
        "float32,bf16",
        "--blocks",
        "20,60",
        "--json",
        path,
        "-q",
        "--fake-model",
    )
    assert said.code == 0, said.err
    found = json.loads(path.read_text())
    assert {"peak_running", "prefix_hit_rate"} | KEYS <= found["pools"][0].keys()
    assert [(p["kv_dtype"], p["blocks"]) for p in found["pools"]] == [("float32", 20), ("float32", 60), ("bf16", 40), ("bf16", 120)]
    assert {"command", "machine", "versions", "seeds", "workload", "choices", "step_budget"} <= found.keys()
    assert "completed" in said.err


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--tokens 1 --blocks 1", "give one of them"),
        ("--num-kv-blocks 9", "sets the size of the KV pool itself"),
        ("--kv-dtypes int3", "must be one of"),
        ("--blocks 0", "at least 1"),
        ("--mix nothing", "must be one of chat"),
        ("--mix chat --workload x", "give one of them"),
        ("--rows 0", "at least 1"),
    ],
)
def test_wrong_settings_are_refused(cli: Cli, flags: str, words: str) -> None:
    said = cli("sweep-kv", *flags.split())
    assert said.code == 2
    assert words in said.err
