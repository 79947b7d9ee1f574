"""Greedy output equals Hugging Face `generate()` in float32 on the same weights, token for token."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from batchinfer.build import open_model
from batchinfer.config import EngineConfig
from batchinfer.core.request import Request, SamplingParams
from batchinfer.weights.source import ModelFiles
from tests.engine.engines import RecordingHead, build, ids, open_tiny, run_all
from tests.oracle.tiny_models import SHAPES, VOCAB_SIZE, write_gguf, write_tiny

GREEDY = Path(__file__).parent.parent / "oracle" / "smollm2_greedy.json"


@pytest.mark.model
def test_smollm2_equals_transformers_generate(smollm2: ModelFiles) -> None:
    oracle = json.loads(GREEDY.read_text())
    model = open_model(EngineConfig(model=str(smollm2.path)))
    engine = build(model, dtype="float32")
    params = SamplingParams(max_tokens=oracle["max_new_tokens"])
    rows = []
    for row, item in enumerate(oracle["rows"]):
        if "messages" in item:
            prompt = model.tokenizer.encode(model.tokenizer.render_chat(item["messages"]), add_special_tokens=False)
        else:
            prompt = model.tokenizer.encode(item["prompt"], add_special_tokens=True)
        assert list(prompt) == item["prompt_token_ids"], item["name"]
        rows.append(Request(row, ids(prompt), params))
    assert len(rows) >= 32
    results = run_all(engine, rows)
    for row, item in enumerate(oracle["rows"]):
        assert results[row].token_ids.tolist() == item["output_ids"], item["name"]
        assert results[row].text == item["text"], item["name"]


@pytest.mark.parametrize("shape", SHAPES)
def test_tiny_models_give_transformers_logits(tmp_path: Path, shape: str) -> None:
    """Prefill, chunks, decode and a cache hit, against one full forward pass of transformers."""
    from transformers import AutoModelForCausalLM

    folder = write_tiny(tmp_path / "tiny", shape)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = open_tiny(folder)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB_SIZE, n).tolist() for n in (1, 5, 64, 65, 150)]
    prompts.append([*prompts[-1][:100], 7, 8, 9])  # shares blocks with the row before
    rows = [Request(i, ids(p), SamplingParams(max_tokens=12, ignore_eos=True)) for i, p in enumerate(prompts)]
    for budget in (1024, 33):
        engine = build(model, max_num_batched_tokens=budget, block_size=16, order="arrival")
        seen = RecordingHead(engine)
        results = run_all(engine, rows)
        assert engine.stats.cached_prompt_tokens >= 96
        for row, prompt in enumerate(prompts):
            whole = prompt + results[row].token_ids.tolist()
            with torch.no_grad():
                expected = reference(torch.tensor([whole])).logits[0]
            for position in range(len(prompt), len(whole)):
                assert torch.allclose(seen.logits[row, position], expected[position - 1], atol=2e-4, rtol=1e-4), (row, position)


@pytest.mark.parametrize("shape", ["llama1", "llama2", "llama3.2"])
def test_gguf_and_safetensors_agree(tmp_path: Path, shape: str) -> None:
    folder = write_tiny(tmp_path / "tiny", shape)
    path = write_gguf(folder, tmp_path / "tiny.gguf")
    rng = np.random.default_rng(2)
    rows = [Request(i, ids(rng.integers(0, VOCAB_SIZE, 20 + i).tolist()), SamplingParams(max_tokens=24, ignore_eos=True)) for i in range(6)]
    outputs = []
    for place in (folder, path):
        results = run_all(build(open_tiny(place), dtype="float32"), rows)
        outputs.append([results[i].token_ids.tolist() for i in range(len(rows))])
    assert outputs[0] == outputs[1]
