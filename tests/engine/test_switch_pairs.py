"""No feature that is switched on or off changes a byte of any row, greedy or seeded, together with any other.

Every pair of values of two switches occurs in at least one run. Where kernels or number formats differ, the arithmetic
does: a run is held against one of the same arithmetic with everything else as it is by default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchinfer.build import ModelHandle
from batchinfer.core.request import Request, SamplingParams
from batchinfer.core.stats import RunStats
from tests.engine.covering import covering_runs
from tests.engine.engines import build, ids, open_tiny, run_all
from tests.engine.kept_weights import kept_weights
from tests.oracle.tiny_models import VOCAB_SIZE, write_tiny

BLOCK_SIZE = 16
ON_OFF = (True, False)
ARITHMETIC: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32", "bf16") if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ("float32",),
    "quantization": ("none", "int8", "int4"),
    "kv_cache_dtype": ("auto", "int8"),
    "flash_attention": ON_OFF,
    "graphs": ON_OFF,
}
SWITCHES: dict[str, tuple[Any, ...]] = ARITHMETIC | {
    "kv_cache": ON_OFF,
    "paged": ON_OFF,
    "prefix_caching": ON_OFF,
    "continuous_batching": ON_OFF,
    "chunked_prefill": ON_OFF,
    "order": ("auto", "arrival"),
    "speculative": ("off", "ngram", "draft:same", "draft:other"),  # a draft model that is the model, and one that is not
    "num_speculative_tokens": (3, 1),
    "max_num_seqs": (64, 5),
    "max_num_batched_tokens": (1024, 40),
    "pool": ("roomy", "tight"),
}


def mixed_rows() -> list[Request]:
    """Greedy and seeded rows with and without a shared beginning, some twice with another max_tokens."""
    rng = np.random.default_rng(5)
    shared = rng.integers(0, VOCAB_SIZE, 35).tolist()
    rows = []
    for i in range(9):
        own = rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 30))).tolist()
        prompt = (shared if i % 3 else []) + own + own[-3:]  # an end that was there before: something to guess from
        noise = {"temperature": 1.2, "top_p": 0.9 if i % 4 else 1.0, "top_k": (0, 20)[i % 2], "seed": i} if i % 2 else {}
        rows.append(Request(i, ids(prompt), SamplingParams(max_tokens=4 + 4 * i, ignore_eos=True, **noise)))
    return rows + [Request(len(rows) + i, r.prompt_ids, SamplingParams(max_tokens=5 + 3 * i)) for i, r in enumerate(rows[:4])]


def answers(model: ModelHandle, rows: list[Request], run: dict[str, Any]) -> tuple[dict[int, Any], RunStats]:
    """(token ids, text, finish reason) by row, and the run's counters."""
    options = {name: value for name, value in run.items() if name != "pool"}
    if run.get("speculative", "off").startswith("draft"):
        name = model.files.path.name if run["speculative"] == "draft:same" else "other"
        options["speculative"] = f"draft:{model.files.path.parent / name}"
    slab = -(-model.max_model_len // BLOCK_SIZE)
    tight = run.get("pool") == "tight"
    if tight:  # room for one and a half of the longest rows, or for two slabs
        options["num_kv_blocks"] = slab * 3 // 2 if run["paged"] else 2 * slab
    engine = build(model, optimistic=tight, block_size=BLOCK_SIZE, **options)
    results = run_all(engine, rows)
    if tight and not run["paged"]:
        assert engine.stats.peak_running == 2 or run["max_num_batched_tokens"] < 1024
    if not run.get("flash_attention", True):
        assert engine.settings["attention"].startswith("reference")  # type: ignore[attr-defined]
    if not run.get("graphs", True):
        assert engine.settings["sampling"] == engine.settings["rms_norm"] == "reference"
    return {row: (r.token_ids.tolist(), r.text, r.finish_reason) for row, r in results.items()}, engine.stats


def test_no_pair_of_switches_changes_a_byte(tmp_path: Path) -> None:
    rows = mixed_rows()
    model = open_tiny(write_tiny(tmp_path / "tiny", "llama2"), max_model_len=max(len(r.prompt_ids) + r.params.max_tokens for r in rows))
    write_tiny(tmp_path / "other", "llama3")
    plain: dict[tuple[Any, ...], dict[int, Any]] = {}
    preemptions = accepted = refused = 0
    with kept_weights():
        for run in covering_runs(SWITCHES):
            arithmetic = {name: run[name] for name in ARITHMETIC}
            key = tuple(arithmetic.values())
            if key not in plain:
                plain[key], _ = answers(model, rows, arithmetic)
            got, stats = answers(model, rows, run)
            different = [row for row in plain[key] if got[row] != plain[key][row]]
            assert not different, (run, different)
            preemptions += stats.preemptions
            accepted += stats.accepted_tokens
            refused += stats.proposed_tokens - stats.accepted_tokens
    assert preemptions > 0, "the tight pool forced no preemption: the test proves too little"
    assert min(accepted, refused) > 50, "hardly a guess was right, or wrong: the test proves too little"
