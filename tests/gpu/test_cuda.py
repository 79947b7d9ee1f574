"""A CUDA device gives what the CPU gives; skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchinfer import LLM, Result, SamplingParams
from tests.oracle.tiny_models import write_tiny

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
PROMPTS = ["the end", "a", "of the and " * 20, "in it " * 3, "the end of the band"]


@pytest.fixture(scope="module", params=["llama2", "llama3.2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("gpu") / "tiny", request.param)


def answers(folder: Path, device: str, **options: Any) -> list[Result]:
    llm = LLM(str(folder), device=device, **options)
    return llm.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True), progress=False)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 3, "num_kv_blocks": 12}], ids=["chosen", "narrow"])
def test_greedy_float32_tokens_are_those_of_the_cpu(folder: Path, options: dict[str, int]) -> None:
    """The tiny models' best logit is well ahead of the second, so that rounding decides nothing."""
    expected = answers(folder, "cpu", dtype="float32")
    found = answers(folder, DEVICE, dtype="float32", **options)
    assert [result.token_ids.tolist() for result in found] == [result.token_ids.tolist() for result in expected]


def test_bf16_runs_to_the_end(folder: Path) -> None:
    found = answers(folder, DEVICE, dtype="bf16")
    assert [(result.error, len(result.token_ids)) for result in found] == [(None, 24)] * len(PROMPTS)


def test_sampled_rows_with_a_seed_repeat(folder: Path) -> None:
    llm = LLM(str(folder), device=DEVICE, dtype="float32")
    params = SamplingParams(max_tokens=16, temperature=0.9, top_p=0.9, top_k=40, seed=5, ignore_eos=True)
    first, second = (llm.generate(PROMPTS, params, progress=False) for _ in range(2))
    assert [result.token_ids.tolist() for result in first] == [result.token_ids.tolist() for result in second]
