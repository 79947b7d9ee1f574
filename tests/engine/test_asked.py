"""What rows ask for, on real engines: no way of batching, guessing or remembering changes a byte of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from batchinfer.build import ModelHandle
from batchinfer.core.request import Request, Result, SamplingParams
from batchinfer.core.token_logprobs import TokenLogprobs
from batchinfer.engine import Engine
from tests.engine.engines import RecordingHead, build, ids, open_tiny, run_all
from tests.oracle.tiny_models import VOCAB_SIZE, write_tiny

FLOAT32 = {"dtype": "float32"}
SMALL_POOL = {"num_kv_blocks": 14, "block_size": 16, "optimistic": True}
WISHES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4, "logprobs": 3},
    {"presence_penalty": 0.8, "frequency_penalty": 0.5, "temperature": 0.7, "prompt_logprobs": 2},
    {"logit_bias": {7: 4.0, 11: -100.0}, "n": 3, "temperature": 0.9, "logprobs": 0},
    {"bad_words": ["e", "th"], "min_tokens": 5, "top_p": 0.9, "temperature": 0.8},
    {},
    {"prompt_logprobs": 0, "logprobs": 1, "n": 2, "temperature": 1.0, "frequency_penalty": 1.0},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelHandle:
    return open_tiny(write_tiny(tmp_path_factory.mktemp("tiny") / "tiny", "llama2"))


def rows(count: int = 12) -> list[Request]:
    """Prompts that go round in circles, so that guesses are often right; half of them behind a shared beginning."""
    rng = np.random.default_rng(8)
    shared = rng.integers(0, VOCAB_SIZE, 40).tolist()
    made = []
    for i in range(count):
        circle = rng.integers(0, VOCAB_SIZE, 4).tolist()
        asked = SamplingParams(max_tokens=14 + 2 * i, ignore_eos=True, **WISHES[i % len(WISHES)])
        made.append(Request(i, ids((shared if i % 2 else []) + circle * 3), asked))
    return made


def numbers(found: TokenLogprobs | None) -> Any:
    return None if found is None else (found.logprobs.tobytes(), found.top_ids.tolist(), found.top_logprobs.tobytes())


def told(result: Result) -> Any:
    assert result.error is None
    choices = [(c.text, c.finish_reason, c.token_ids.tolist(), numbers(c.logprobs)) for c in result.choices]
    return result.text, result.token_ids.tolist(), numbers(result.logprobs), numbers(result.prompt_logprobs), choices


def answers(engine: Engine, asked: list[Request]) -> dict[int, Any]:
    return {row: told(result) for row, result in run_all(engine, asked).items()}


def test_batching_memory_and_guessing_change_no_byte(tiny: ModelHandle, tmp_path: Path) -> None:
    asked = rows()
    expected = answers(build(tiny, max_num_seqs=1, prefix_caching=False, **FLOAT32), asked)
    other = write_tiny(tmp_path / "other", "llama3")
    ways: list[dict[str, Any]] = [
        {},
        {"max_num_seqs": 3, "max_num_batched_tokens": 11},
        SMALL_POOL,
        {"speculative": "ngram", "num_speculative_tokens": 4},
        {"speculative": "ngram", "num_speculative_tokens": 3, **SMALL_POOL},
        {"speculative": f"draft:{tiny.files.path}", "num_speculative_tokens": 3, "max_num_batched_tokens": 13, "max_num_seqs": 5},
        {"speculative": f"draft:{other}", "num_speculative_tokens": 2},
        {"kv_cache": False, "max_num_seqs": 4},
        {"paged": False, "max_num_seqs": 4},
        {"continuous_batching": False},
    ]
    for options in ways:
        engine = build(tiny, **FLOAT32, **options)
        assert answers(engine, asked) == expected, options
        if "speculative" in options:
            assert engine.stats.proposed_tokens > 0
        assert ("optimistic" not in options) or engine.stats.preemptions > 0


def test_a_draft_model_that_is_the_model_obeys_the_same_wishes(tiny: ModelHandle) -> None:
    """Penalties, biases and bans shape its guesses, too: otherwise many of them would be wrong."""
    engine = build(tiny, speculative=f"draft:{tiny.files.path}", num_speculative_tokens=3, **FLOAT32)
    run_all(engine, rows())
    assert engine.stats.accepted_tokens == engine.stats.proposed_tokens > 100


def test_logprobs_are_the_log_softmax_of_the_models_own_logits(tiny: ModelHandle) -> None:
    """Whatever is done to them afterwards: temperature, filters, penalties, biases."""
    params = {"temperature": 0.6, "top_k": 3, "repetition_penalty": 1.7, "logit_bias": {5: 9.0}, "logprobs": 4, "ignore_eos": True}
    asked = [Request(i, ids([3, 9 + i, 27]), SamplingParams(max_tokens=12, **params)) for i in range(5)]  # type: ignore[arg-type]
    engine = build(tiny, **FLOAT32)
    recorded = RecordingHead(engine)
    for row, result in run_all(engine, asked).items():
        assert result.logprobs is not None
        assert len(result.logprobs.logprobs) == len(result.token_ids) == 12
        for place, token_id in enumerate(result.token_ids.tolist()):
            exact = recorded.logits[row, 3 + place].double().log_softmax(0)
            assert abs(float(exact[token_id]) - result.logprobs.logprobs[place]) < 1e-5
            top = exact.topk(4)
            assert result.logprobs.top_ids[place].tolist() == top.indices.tolist()
            assert np.allclose(result.logprobs.top_logprobs[place], top.values.numpy(), atol=1e-5)


def test_prompt_logprobs_are_those_of_transformers_with_and_without_prefix_cache(tiny: ModelHandle) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny.files.path, dtype=torch.float32)
    rng = np.random.default_rng(3)
    shared = rng.integers(0, VOCAB_SIZE, 70).tolist()
    prompts = [[*shared, *rng.integers(0, VOCAB_SIZE, 9).tolist()] for _ in range(4)] + [[5], [5, 6]]
    asked = [Request(i, ids(prompt), SamplingParams(max_tokens=3, prompt_logprobs=2 * (i % 2))) for i, prompt in enumerate(prompts)]
    asked += [Request(9, ids(prompts[0]), SamplingParams(max_tokens=3))]
    found = {}
    for cached in (True, False):
        engine = build(tiny, prefix_caching=cached, max_num_batched_tokens=32, max_num_seqs=2, **FLOAT32)
        warm = run_all(engine, [Request(0, ids(prompts[0]), SamplingParams(max_tokens=3))])
        assert warm[0].error is None
        found[cached] = run_all(engine, asked)
    for i, prompt in enumerate(prompts):
        with torch.inference_mode():
            exact = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
        numbers_of = found[True][i].prompt_logprobs
        assert numbers_of is not None
        assert np.isnan(numbers_of.logprobs[0])
        for place in range(1, len(prompt)):
            assert abs(float(exact[place - 1, prompt[place]]) - numbers_of.logprobs[place]) < 2e-4
            if i % 2:
                assert numbers_of.top_ids[place].tolist() == exact[place - 1].topk(2).indices.tolist()
        assert numbers(numbers_of) == numbers(found[False][i].prompt_logprobs)
    assert found[True][9].num_cached_tokens > 0
    assert found[True][0].num_cached_tokens == 0


def test_choices_have_seeds_of_their_own_and_the_first_is_the_only_one_of_n_1(tiny: ModelHandle) -> None:
    prompt = ids(list(range(40)))
    one = run_all(build(tiny, **FLOAT32), [Request(0, prompt, SamplingParams(max_tokens=9, temperature=1.0, seed=-3))])[0]
    many = run_all(build(tiny, **FLOAT32), [Request(0, prompt, SamplingParams(max_tokens=9, temperature=1.0, seed=-3, n=5))])[0]
    assert many.token_ids.tolist() == one.token_ids.tolist()
    assert many.text == one.text == many.choices[0].text
    assert len({tuple(choice.token_ids.tolist()) for choice in many.choices}) == 5
    assert many.num_generated_tokens == sum(len(choice.token_ids) for choice in many.choices)
    greedy = run_all(build(tiny, **FLOAT32), [Request(0, prompt, SamplingParams(max_tokens=9, n=3))])[0]
    assert len({choice.text for choice in greedy.choices}) == 1


@pytest.mark.parametrize("length", [3, 20, 32, 33, 50])
@pytest.mark.parametrize("options", [{}, {"speculative": "draft", "num_speculative_tokens": 2}, {"kv_cache_dtype": "int8"}], ids=str)
def test_the_prompt_of_several_answers_is_computed_once(tiny: ModelHandle, length: int, options: dict[str, Any]) -> None:
    """Its last, partial block is copied: every further answer computes one token of it, and says what it says alone."""
    prompt = ids(list(range(60, 60 + length)))
    how = {**options, "speculative": f"draft:{tiny.files.path}"} if "speculative" in options else options
    engine = build(tiny, max_num_seqs=8, **FLOAT32, **how)
    asked = Request(0, prompt, SamplingParams(max_tokens=4, temperature=1.0, n=6, ignore_eos=True))
    found = told(run_all(engine, [asked])[0])
    lone = build(tiny, max_num_seqs=1, prefix_caching=False, **FLOAT32, **options | {"speculative": "off", "num_speculative_tokens": None})
    assert found == told(run_all(lone, [asked])[0])
    if "speculative" not in options:
        assert engine.stats.computed_tokens == length + 5 + 6 * 3  # the last token again for the other answers, then what they say


def test_a_row_fails_when_one_of_its_choices_does_and_the_others_run(tiny: ModelHandle) -> None:
    engine = build(tiny, **FLOAT32)
    inner = engine.head

    class Breaking:
        def decide(self, hidden: Any, batch: Any) -> Any:
            result = inner.decide(hidden, batch)
            for slot in batch.sampling_slots.tolist():
                seq = engine.memory.table.sequences[slot]
                assert seq is not None
                if seq.request.row == 1 and seq.choice == 2:
                    raise RuntimeError("broken choice")
            return result

    engine.head = Breaking()
    asked = [Request(i, ids([1, 2, 3 + i]), SamplingParams(max_tokens=6, temperature=1.0, n=3)) for i in range(3)]
    results = run_all(engine, asked)
    assert {row: result.error is None for row, result in results.items()} == {0: True, 1: False, 2: True}
    assert "broken choice" in str(results[1].error)
