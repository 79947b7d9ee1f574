"""The Python interface."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer import LLM, EngineConfig, SamplingParams
from batchinfer.errors import ConfigError
from tests.oracle.tiny_models import write_tiny


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(write_tiny(tmp_path_factory.mktemp("llm") / "tiny", "llama2")), device="cpu")


def test_results_stand_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["the end", "a", "of the and", "in it"]
    lengths = [3, 12, 1, 7]
    results = llm.generate(prompts, [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths], progress=False)
    assert [len(r.token_ids) for r in results] == lengths
    alone = llm.generate(prompts[1], SamplingParams(max_tokens=12, ignore_eos=True), progress=False)
    assert alone[0].text == results[1].text


def test_ids_chats_and_bad_rows(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4)
    assert llm.generate([[5, 6, 7], [5, 6, 7]], params, progress=False)[0].text == llm.generate([5, 6, 7], params, progress=False)[0].text
    answers = llm.chat([[{"role": "user", "content": "the"}], [{"role": "user", "content": 5}]], params, progress=False)
    assert answers[0].error is None
    assert answers[1].error is not None
    empty = llm.generate([""], params, progress=False)[0]
    assert empty.error is not None
    assert empty.error.code == "empty_prompt"


def test_impossible_settings_name_the_way_out() -> None:
    for options, word in [
        ({"block_size": 3}, "--block-size"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"num_kv_blocks": 1}, "--num-kv-blocks"),
        ({"threads": 0}, "--threads"),
        ({"quantization": "fp8"}, "not supported by this version"),
        ({"num_kv_blocks": 5, "kv_cache_memory": 5}, "both"),
    ]:
        with pytest.raises(ConfigError, match=word):
            EngineConfig(**options)  # type: ignore[arg-type]


def test_a_pool_larger_than_memory_is_refused_with_what_fits(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most"):
        LLM(str(write_tiny(tmp_path / "m", "llama2")), kv_cache_memory=10 * 2**40).generate("a", progress=False)
