"""On real prompts and the default model, a row's tokens are the same bytes at any concurrency, chunk size, cache state and preemption.

Every pair of concurrency and chunk size occurs, with cache and pool varied among them. All rows begin like one of a few
prompts and end after different numbers of tokens, so that one run of the prompts says what every row must be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from batchinfer.build import ModelHandle, open_model
from batchinfer.config import EngineConfig
from batchinfer.core.request import Request, SamplingParams
from batchinfer.ops.native.library import load_native
from batchinfer.weights.source import ModelFiles
from tests.engine.engines import build, ids, run_all
from tests.engine.kept_weights import kept_weights
from tests.ops.native_tables import VARIANTS

pytestmark = pytest.mark.model
ORACLE = json.loads((Path(__file__).parent.parent / "oracle" / "smollm2_greedy.json").read_text())["rows"]
BLOCK = 16
LONGEST = 6  # tokens of an answer
NATIVE = load_native()
needs_native = pytest.mark.skipif(NATIVE.library is None, reason=NATIVE.reason)
INT8 = {"dtype": "bf16", "quantization": "int8", "kv_cache_dtype": "int8"}


@dataclass(frozen=True)
class Run:
    """Settings of one engine; a tight pool forces preemptions."""

    concurrency: int
    budget: int
    cache: bool
    tight: bool = False


RUNS = [
    Run(1, 1024, cache=True), Run(1, 100, cache=False), Run(1, 33, cache=True),
    Run(7, 1024, cache=False, tight=True), Run(7, 100, cache=True), Run(7, 33, cache=True, tight=True),
    Run(64, 1024, cache=True, tight=True), Run(64, 100, cache=False, tight=True), Run(64, 33, cache=True),
    Run(256, 1024, cache=False), Run(256, 100, cache=True, tight=True), Run(256, 33, cache=True),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(smollm2: ModelFiles) -> Iterator[ModelHandle]:
    with kept_weights():
        yield open_model(EngineConfig(model=str(smollm2.path)))


def prompts(most: int) -> list[list[int]]:
    """Raw texts, then chats, which share their first block; the shortest of each."""
    found = [[row["prompt_token_ids"] for row in ORACLE if ("messages" in row) is chat] for chat in (False, True)]
    raw, chats = (sorted(each, key=len) for each in found)
    return [*raw[: most * 3 // 4], *chats[: most - most * 3 // 4]]


def rows_of(count: int) -> list[Request]:
    """So many rows over the prompts. Beyond 64 the prompts are short, and so are the answers."""
    texts = prompts(20 if count <= 64 else 12)
    lengths = [1 + (row * 7) % (LONGEST if count <= 64 else 3) for row in range(count)]
    return [Request(row, ids(texts[row % len(texts)]), SamplingParams(max_tokens=n, ignore_eos=True)) for row, n in enumerate(lengths)]


def answers(model: ModelHandle, run: Run, rows: list[Request], options: dict[str, str]) -> tuple[dict[int, list[int]], int]:
    """Tokens by row, and preemptions."""
    longest = max(len(r.prompt_ids) + r.params.max_tokens for r in rows)
    wanted = sum(-(-(len(r.prompt_ids) + r.params.max_tokens) // BLOCK) for r in rows[: run.concurrency])
    blocks = max(-(-longest // BLOCK) + 1, wanted // 2) if run.tight else wanted * 2 + 8
    engine = build(
        model,
        optimistic=run.tight,
        max_num_seqs=run.concurrency,
        max_num_batched_tokens=run.budget,
        prefix_caching=run.cache,
        num_kv_blocks=blocks,
        block_size=BLOCK,
        **options,
    )
    results = run_all(engine, rows)
    return {row: result.token_ids.tolist() for row, result in results.items()}, engine.stats.preemptions


def check(model: ModelHandle, runs: list[Run], options: dict[str, str]) -> None:
    texts = prompts(20)
    asked = [Request(i, ids(text), SamplingParams(max_tokens=LONGEST, ignore_eos=True)) for i, text in enumerate(texts)]
    said, _ = answers(model, Run(8, 512, cache=False), asked, options)
    expected = {tuple(text): said[i] for i, text in enumerate(texts)}
    assert len({tuple(each) for each in said.values()}) > len(texts) // 2
    preemptions = 0
    for run in runs:
        rows = rows_of(max(run.concurrency, 10))
        got, preempted = answers(model, run, rows, options)
        preemptions += preempted
        different = [r.row for r in rows if got[r.row] != expected[tuple(r.prompt_ids.tolist())][: r.params.max_tokens]]
        assert not different, (run, different)
    assert preemptions > 0 or not any(run.tight for run in runs), "the tight pools forced no preemption: the test proves too little"


def test_bf16(model: ModelHandle) -> None:
    check(model, RUNS, {"dtype": "bf16"})


def test_int8(model: ModelHandle) -> None:
    check(model, RUNS, INT8)


def test_float32(model: ModelHandle) -> None:
    check(model, [RUNS[2], RUNS[3], RUNS[4], RUNS[8], RUNS[9]], {"dtype": "float32"})


@needs_native
@pytest.mark.parametrize(
    "variant, options",
    [("avx2", {"dtype": "bf16"}), ("avx2", INT8), ("avx2", {"dtype": "float32", "kv_cache_dtype": "int8"}), ("avx512", {"dtype": "bf16"})],
    ids=["AVX2, bf16", "AVX2, int8", "AVX2, float32, KV int8", "AVX-512, bf16"],
)
def test_with_the_variants_for_lesser_processors(
    model: ModelHandle, variant: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if variant not in VARIANTS:
        pytest.skip("this processor's own variant, or none of its")
    monkeypatch.setenv("BATCHINFER_NATIVE", variant)
    assert load_native().variant == variant
    check(model, [RUNS[1], RUNS[5]], options)


def test_native_code_changes_no_greedy_token_in_float32(model: ModelHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Request(i, ids(text), SamplingParams(max_tokens=8)) for i, text in enumerate(prompts(12))]
    said = {}
    for switch in ("off", "avx2", "on"):
        monkeypatch.setenv("BATCHINFER_NATIVE", switch)
        said[switch], _ = answers(model, Run(12, 1024, cache=True), rows, {"dtype": "float32"})
    assert said["off"] == said["avx2"] == said["on"]
