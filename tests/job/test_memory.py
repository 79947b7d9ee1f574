"""Memory does not grow with the number of rows, whatever the formats."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.config import EngineConfig
from batchinfer.core.request import FinishReason, Request, Result
from batchinfer.core.stats import RunStats
from batchinfer.io.options import InputOptions, OutputOptions
from batchinfer.job import JobParts, run_job
from tests.job.world import World


class Instant:
    """Answers every row at once, in pairs the wrong way round."""

    choices: tuple[str, ...] = ()
    settings: dict[str, Any] = {}  # noqa: RUF012
    limits = SimpleNamespace(max_num_seqs=2, max_model_len=100, pool_tokens=1000)

    def __init__(self) -> None:
        self.stats = RunStats()

    def run(self, requests: Iterable[Request | Result]) -> Iterator[Result]:
        held: list[Result] = []
        for item in requests:
            held.append(
                item if isinstance(item, Result) else Result(item.row, "fine", FinishReason.STOP, np.arange(4), len(item.prompt_ids))
            )
            if len(held) == 2:
                yield from reversed(held)
                held = []
        yield from held


def peak_of(source: Path, output: Path) -> int:
    world = World()
    parts = JobParts(lambda config: world._open(config), lambda *_: Instant(), lambda _: "model")  # type: ignore[arg-type, return-value]
    tracemalloc.start()
    report = run_job(EngineConfig(), InputOptions(str(source), chat=False), OutputOptions(str(output)), {}, parts=parts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.exit_code == 0
    return peak


@pytest.mark.parametrize(("kind", "ending"), [("jsonl", "jsonl"), ("parquet", "jsonl"), ("parquet", "parquet")])
def test_flat_memory(tmp_path: Path, kind: str, ending: str) -> None:
    peaks = []
    for count in (2_000, 10_000):
        source = tmp_path / f"{count}.{kind}"
        if kind == "jsonl":
            source.write_text("".join(f'{{"id":{i},"prompt":"a prompt of some forty characters, {i}"}}\n' for i in range(count)))
        else:
            table = pa.table({"id": range(count), "prompt": [f"a prompt of some forty characters, {i}" for i in range(count)]})
            pq.write_table(table, source)
        output = tmp_path / f"{count}.out.{ending}"
        peaks.append(peak_of(source, output))
        rows = output.read_bytes().count(b"\n") if ending == "jsonl" else pq.read_metadata(output).num_rows
        assert rows == count
    assert peaks[1] < peaks[0] + (2 << 20)
