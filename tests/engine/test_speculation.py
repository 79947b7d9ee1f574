"""Speculation on real engines: no guess changes a byte, and a draft model that equals the model is always right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchinfer.build import ModelHandle
from batchinfer.core.request import Request, SamplingParams
from batchinfer.engine import Engine
from batchinfer.errors import ConfigError
from tests.engine.engines import build, ids, open_tiny, run_all
from tests.oracle.tiny_models import VOCAB_SIZE, write_tiny

FLOAT32 = {"dtype": "float32"}
INT8 = {"dtype": "float32", "quantization": "int8", "kv_cache_dtype": "int8"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelHandle:
    return open_tiny(write_tiny(tmp_path_factory.mktemp("tiny") / "tiny", "llama2"))


def repeating_rows(count: int = 10) -> list[Request]:
    """Prompts that go round in circles, half of them behind a shared beginning; greedy, seeded and filtered rows, some that stop."""
    rng = np.random.default_rng(8)
    shared = rng.integers(0, VOCAB_SIZE, 40).tolist()
    rows = []
    for i in range(count):
        circle = rng.integers(0, VOCAB_SIZE, 4).tolist()
        noise: dict[str, Any] = ({}, {"temperature": 0.4}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.3, "top_k": 5})[i % 4]
        stop = {"stop_token_ids": tuple(range(0, VOCAB_SIZE, 9)), "min_tokens": 7} if i % 5 == 4 else {}
        prompt = (shared if i % 2 else []) + circle * 3
        rows.append(Request(i, ids(prompt), SamplingParams(max_tokens=24 + 3 * i, ignore_eos=True, **noise, **stop)))
    return rows + [Request(count + i, row.prompt_ids, SamplingParams(max_tokens=9 + i, ignore_eos=True)) for i, row in enumerate(rows[:4])]


def answers(engine: Engine, rows: list[Request]) -> dict[int, Any]:
    return {row: (r.token_ids.tolist(), r.text, r.finish_reason) for row, r in run_all(engine, rows).items()}


@pytest.mark.parametrize("arithmetic", [FLOAT32, INT8], ids=["float32", "int8"])
@pytest.mark.parametrize("length", [None, 1, 5])
def test_ngram_drafts_change_no_byte(tiny: ModelHandle, arithmetic: dict[str, str], length: int | None) -> None:
    rows = repeating_rows()
    expected = answers(build(tiny, **arithmetic), rows)
    for options in ({}, {"max_num_seqs": 3, "max_num_batched_tokens": 11}, {"num_kv_blocks": 12, "block_size": 16, "optimistic": True}):
        engine = build(tiny, speculative="ngram", num_speculative_tokens=length, **arithmetic, **options)
        assert answers(engine, rows) == expected, options
        assert engine.stats.proposed_tokens > 0 or length is None
        assert (engine.stats.preemptions > 0) == ("optimistic" in options)


@pytest.mark.parametrize("arithmetic", [FLOAT32, INT8], ids=["float32", "int8"])
def test_a_draft_model_that_is_the_model_is_always_right(tiny: ModelHandle, arithmetic: dict[str, str]) -> None:
    """Also behind shared prefixes, in chunks, and after preemption: then its keys and values are where they should be."""
    rows = repeating_rows()
    expected = answers(build(tiny, **arithmetic), rows)
    for options in ({}, {"max_num_seqs": 3, "max_num_batched_tokens": 11}, {"num_kv_blocks": 12, "block_size": 16, "optimistic": True}):
        engine = build(tiny, speculative=f"draft:{tiny.files.path}", num_speculative_tokens=3, **arithmetic, **options)
        assert answers(engine, rows) == expected, options
        stats = engine.stats
        assert stats.accepted_tokens == stats.proposed_tokens > 100
        assert stats.cached_prompt_tokens > 0
        assert (stats.preemptions > 0) == ("optimistic" in options)


@pytest.mark.parametrize("length", [None, 2])
def test_another_draft_model_changes_no_byte(tiny: ModelHandle, tmp_path: Path, length: int | None) -> None:
    other = write_tiny(tmp_path / "other", "llama3")
    rows = repeating_rows()
    expected = answers(build(tiny, **FLOAT32), rows)
    engine = build(tiny, speculative=f"draft:{other}", num_speculative_tokens=length, **FLOAT32)
    assert answers(engine, rows) == expected
    assert engine.stats.accepted_tokens < engine.stats.proposed_tokens or length is None


def test_a_draft_model_with_another_tokenizer_is_refused(tiny: ModelHandle, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other", "llama2")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("<|im_start|>", "<|im_begin|>"))
    with pytest.raises(ConfigError, match="tokenizer"):
        build(tiny, speculative=f"draft:{other}", **FLOAT32)
