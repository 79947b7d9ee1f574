"""Perplexity of the default model in each kind of linear layer, on held-out text.

    python -m tests.quant.perplexity [none int8 int4 ...] [--kv bf16 int8] [--tokens 12288] [--workload prompts.jsonl] [--model NAME]

The decoder and the LM head are those of a run; attention is torch's, exact, over windows of text, so that the figures are
about the linear layers alone, unless formats of keys and values are named: then it is the run's own. The text is that of the installed Python's own documentation and, where a workload is given,
its prompts; none of it is used for calibration.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from batchinfer.attention.base import Attend, AttnInputs, AttnSpec
from batchinfer.attention.kv_cache import KV_FORMATS, KVCache
from batchinfer.build import ModelHandle, open_model
from batchinfer.config import EngineConfig
from batchinfer.layers.lm_head import LmHead
from batchinfer.model.assemble import Placement, assemble
from batchinfer.model.decoder import Decoder
from batchinfer.model.load import iter_weights
from batchinfer.ops.reference import rotary
from batchinfer.ops.rows import Entry, Product, to_dense
from batchinfer.runtime.device import ComputeTarget, Wanted, choose_attention, choose_target

WINDOW = 1024
BLOCK_SIZE = 32
WINDOWS_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class Model:
    """What a run computes with, attention aside."""

    spec: AttnSpec
    target: ComputeTarget
    decoder: Decoder
    head: LmHead

    @property
    def dtype(self) -> torch.dtype:
        return self.target.dtype


def load(handle: ModelHandle, quantization: str, dtype: str = "bf16") -> Model:
    """The model as a run loads it."""
    target = choose_target(Wanted("cpu", dtype, quantization), handle.config.dtype, quantised=True)
    place = Placement(target.dtype, target.device, target.linear, target.ops)
    decoder, head = assemble(handle.config, iter_weights(handle.files, handle.config), place, handle.max_model_len)
    config = handle.config
    return Model(AttnSpec(config.num_heads, config.num_kv_heads, config.head_dim, config.attn_scale), target, decoder, head)


@torch.inference_mode()
def mean_loss(model: Model, windows: Tensor, kv: str | None = None) -> float:
    """Mean negative log-likelihood of every token of windows int64 [N, L] given those before it in its window.

    `kv`: keys and values go through a cache of this format and the run's own attention; None: exact attention.
    """
    losses = [_losses(model, part, kv) for part in windows.split(WINDOWS_AT_ONCE)]
    return float(torch.cat(losses).double().mean())


def _losses(model: Model, windows: Tensor, kv: str | None) -> Tensor:
    predicts = torch.arange(windows.shape[1]).repeat(len(windows)) < windows.shape[1] - 1
    hidden = hidden_states(model, windows, predicts.nonzero().squeeze(1), kv)
    wanted = windows[:, 1:].reshape(-1)
    log_sum, chosen = torch.full((len(wanted),), -torch.inf), torch.zeros(len(wanted))
    for first_id, part in model.head.slices(hidden, model.head.vocab_size):
        logits = to_dense(part, torch.float32).float()
        log_sum = torch.logaddexp(log_sum, logits.logsumexp(1))
        here = (wanted >= first_id) & (wanted < first_id + logits.shape[1])
        chosen[here] = logits[here, wanted[here] - first_id]
    return log_sum - chosen


def hidden_states(model: Model, windows: Tensor, rows: Tensor | None = None, kv: str | None = None) -> Entry:
    """What the head reads, for windows int64 [N, L] side by side: all N * L rows, or some of them."""
    count, length = windows.shape
    attend = _exact(model, count, length) if kv is None else _cached(model, count, length, kv)
    x, residual = model.decoder.forward(windows.view(-1), torch.arange(length).repeat(count), attend)
    if rows is not None:
        x, residual = x.index_select(0, rows), residual.index_select(0, rows)
    return model.decoder.final_norm(x, residual)


def _exact(model: Model, count: int, length: int) -> Attend:
    def attend(layer: int, qkv: Product, cos: Tensor, sin: Tensor) -> Tensor:
        spec, dim = model.spec, model.spec.head_dim
        parts = torch.split(to_dense(qkv, model.dtype), [spec.num_heads * dim, spec.num_kv_heads * dim, spec.num_kv_heads * dim], dim=-1)
        q, k, v = (part.reshape(count * length, -1, dim) for part in parts)
        q, k = rotary(q, k, cos, sin)
        q, k, v = (part.view(count, length, -1, dim).transpose(1, 2).float() for part in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(count * length, -1).to(model.dtype)

    return attend


def _cached(model: Model, count: int, length: int, kv: str) -> Attend:
    """The run's attention over a fresh cache, each window a prompt of its own."""
    blocks = -(-length // BLOCK_SIZE)
    cache = KVCache(model.spec, len(model.decoder.layers), 1 + count * blocks, BLOCK_SIZE, KV_FORMATS[kv], torch.device("cpu"))
    table = np.arange(1, 1 + count * blocks, dtype=np.int32).reshape(count, blocks)
    position, row = np.tile(np.arange(length), count), np.repeat(np.arange(count), length)
    inputs = AttnInputs(
        query_start=np.arange(count + 1, dtype=np.int64) * length,
        start=np.zeros(count, np.int32),
        num_tokens=np.full(count, length, np.int32),
        slots=np.arange(count, dtype=np.int32),
        block_table=table,
        write_block=table[row, position // BLOCK_SIZE].astype(np.int64),
        write_offset=(position % BLOCK_SIZE).astype(np.int64),
    )
    return choose_attention(cache, model.target)[0].bind(inputs)


def windows_of(handle: ModelHandle, text: str, num_tokens: int, length: int = WINDOW) -> Tensor:
    """The text's first tokens in whole windows, int64 [N, length]."""
    ids = handle.tokenizer.encode(text, add_special_tokens=False)[: num_tokens // length * length]
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def python_docs() -> str:
    """The language reference as it is installed with Python."""
    return "\n".join(pydoc_data.topics.topics.values())


def workload_text(path: Path) -> str:
    """The prompts of a workload file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return "\n\n".join(row["prompt"] if "prompt" in row else row["messages"][-1]["content"] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=["none", "int8", "int4"])
    parser.add_argument("--tokens", type=int, default=12288, help="of each text")
    parser.add_argument("--workload", type=Path)
    parser.add_argument("--kv", nargs="*", default=[None], help="formats of keys and values through a cache; without it attention is exact")
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    handle = open_model(EngineConfig(model=options.model, device="cpu"))
    texts = {"Python's documentation": python_docs()}
    if options.workload is not None:
        texts[options.workload.name] = workload_text(options.workload)
    windows = {name: windows_of(handle, text, options.tokens) for name, text in texts.items()}
    base: dict[str, float] = {}
    for kind in options.kinds:
        model = load(handle, kind)
        for kv, (name, rows) in itertools.product(options.kv, windows.items()):
            loss = mean_loss(model, rows, kv)
            base.setdefault(name, loss)
            change = math.exp(loss - base[name]) - 1
            print(f"{kind:5} KV {kv or 'exact'} {name}: perplexity {math.exp(loss):.4f}, {change:+.2%} against the first", flush=True)


if __name__ == "__main__":
    main()
