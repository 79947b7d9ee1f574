"""The equivalence matrix: no engine setting changes a byte of any row, greedy or seeded, on the CPU, in any dtype.

Settings are combined so that every pair of values of two settings occurs in at least one run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchinfer.build import ModelHandle, open_model
from batchinfer.config import EngineConfig
from batchinfer.core.request import Request, SamplingParams
from batchinfer.weights.source import ModelFiles
from tests.engine.covering import covering_runs
from tests.engine.engines import build, ids, open_tiny, run_all
from tests.engine.kept_weights import kept_weights
from tests.oracle.tiny_models import VOCAB_SIZE, write_tiny

SETTINGS: dict[str, tuple[Any, ...]] = {
    "prefix_caching": (True, False),
    "chunked_prefill": (True, False),
    "block_size": (16, 32, 128),
    "max_num_seqs": (64, 1, 5),
    "max_num_batched_tokens": (1024, 7, 50),
    "order": ("auto", "arrival"),
    "pool": ("roomy", "tight"),
}


def outputs(model: ModelHandle, rows: list[Request], run: dict[str, Any], arithmetic: dict[str, str]) -> tuple[dict[int, Any], int]:
    """(token ids, text, finish reason) by row, and preemptions."""
    options = {name: value for name, value in run.items() if name != "pool"}
    if run["pool"] == "tight":
        longest = max(len(r.prompt_ids) + r.params.max_tokens for r in rows)
        options["num_kv_blocks"] = -(-longest * 3 // (2 * run["block_size"])) + 2
    engine = build(model, optimistic=run["pool"] == "tight", **arithmetic, **options)
    results = run_all(engine, rows)
    return {row: (r.token_ids.tolist(), r.text, r.finish_reason) for row, r in results.items()}, engine.stats.preemptions


def check_matrix(model: ModelHandle, rows: list[Request], arithmetic: dict[str, str]) -> None:
    first = {name: values[0] for name, values in SETTINGS.items()}
    with kept_weights():
        expected, _ = outputs(model, rows, first, arithmetic)
        preemptions = 0
        for run in covering_runs(SETTINGS):
            got, preempted = outputs(model, rows, run, arithmetic)
            different = [row for row in expected if got[row] != expected[row]]
            assert not different, (run, different)
            preemptions += preempted
    assert preemptions > 0, "the tight pool forced no preemption: the test proves too little"


def with_duplicates(rows: list[Request]) -> list[Request]:
    """The same prompts again with another max_tokens: wrong publication of generated tokens shows here."""
    again = [Request(len(rows) + i, r.prompt_ids, SamplingParams(max_tokens=5 + i % 7)) for i, r in enumerate(rows)]
    return rows + again


BF16 = {"dtype": "bf16"}
FLOAT32 = {"dtype": "float32"}
KV_INT8 = {"kv_cache_dtype": "int8"}
INT8 = {"quantization": "int8", **KV_INT8}
INT4 = {"quantization": "int4"}


def name_of(arithmetic: dict[str, str]) -> str:
    return " ".join(arithmetic.values())


@pytest.mark.parametrize("arithmetic", [FLOAT32, FLOAT32 | INT8, FLOAT32 | KV_INT8, FLOAT32 | INT4, BF16 | INT8], ids=name_of)
def test_settings_change_no_byte_tiny(tmp_path: Path, arithmetic: dict[str, str]) -> None:
    if arithmetic["dtype"] == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor does not multiply bf16")
    model = open_tiny(write_tiny(tmp_path / "tiny", "llama2"))
    rng = np.random.default_rng(3)
    shared = rng.integers(0, VOCAB_SIZE, 70).tolist()
    rows = []
    for i in range(12):
        prompt = (shared if i % 3 else []) + rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 80))).tolist()
        noise = {"temperature": 1.2, "top_p": 0.9 if i % 4 else 1.0, "top_k": (0, 20)[i % 2], "min_p": 0.02} if i % 2 else {}
        rows.append(Request(i, ids(prompt), SamplingParams(max_tokens=10 + 5 * i, ignore_eos=True, **noise)))
    check_matrix(model, with_duplicates(rows), arithmetic)


@pytest.mark.model
@pytest.mark.parametrize("arithmetic", [BF16, BF16 | INT8, BF16 | KV_INT8], ids=name_of)
def test_settings_change_no_byte_smollm2(smollm2: ModelFiles, arithmetic: dict[str, str]) -> None:
    model = open_model(EngineConfig(model=str(smollm2.path)))
    oracle = json.loads((Path(__file__).parent.parent / "oracle" / "smollm2_greedy.json").read_text())["rows"]
    short = [item for item in oracle if len(item["prompt_token_ids"]) < 120][:4]
    rows = []
    for i, item in enumerate(short):
        noise = {"temperature": 0.9, "top_p": 0.95 if i % 4 else 1.0} if i % 2 else {}
        rows.append(Request(i, ids(item["prompt_token_ids"]), SamplingParams(max_tokens=20, ignore_eos=True, **noise)))
    check_matrix(model, with_duplicates(rows), arithmetic)
