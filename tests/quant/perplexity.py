"""Perplexity of the default model in each kind of linear layer, on held-out text.

    python -m tests.quant.perplexity [--tokens 12288] [--workload prompts.jsonl] [--model NAME] [none int8 int4 ...]

The decoder and the LM head are those of a run; attention is torch's, exact, over windows of text, so that the figures are
about the linear layers alone. The text is that of the installed Python's own documentation and, where a workload is given,
its prompts; none of it is used for calibration.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from batchinfer.attention.base import AttnSpec
from batchinfer.build import ModelHandle, open_model
from batchinfer.config import EngineConfig
from batchinfer.layers.lm_head import LmHead
from batchinfer.model.assemble import Placement, assemble
from batchinfer.model.decoder import Decoder
from batchinfer.model.load import iter_weights
from batchinfer.ops.reference import rotary
from batchinfer.ops.rows import Entry, Product, to_dense
from batchinfer.runtime.device import Wanted, choose_target

WINDOW = 1024
WINDOWS_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class Model:
    """What a run computes with, attention aside."""

    spec: AttnSpec
    dtype: torch.dtype
    decoder: Decoder
    head: LmHead


def load(handle: ModelHandle, quantization: str, dtype: str = "bf16") -> Model:
    """The model as a run loads it."""
    target = choose_target(Wanted("cpu", dtype, quantization), handle.config.dtype, quantised=True)
    place = Placement(target.dtype, target.device, target.linear, target.ops)
    decoder, head = assemble(handle.config, iter_weights(handle.files, handle.config), place, handle.max_model_len)
    config = handle.config
    return Model(AttnSpec(config.num_heads, config.num_kv_heads, config.head_dim, config.attn_scale), target.dtype, decoder, head)


@torch.inference_mode()
def mean_loss(model: Model, windows: Tensor) -> float:
    """Mean negative log-likelihood of every token of windows int64 [N, L] given those before it in its window."""
    losses = [_losses(model, part) for part in windows.split(WINDOWS_AT_ONCE)]
    return float(torch.cat(losses).double().mean())


def _losses(model: Model, windows: Tensor) -> Tensor:
    predicts = torch.arange(windows.shape[1]).repeat(len(windows)) < windows.shape[1] - 1
    hidden = hidden_states(model, windows, predicts.nonzero().squeeze(1))
    wanted = windows[:, 1:].reshape(-1)
    log_sum, chosen = torch.full((len(wanted),), -torch.inf), torch.zeros(len(wanted))
    for first_id, part in model.head.slices(hidden, model.head.vocab_size):
        logits = to_dense(part, torch.float32).float()
        log_sum = torch.logaddexp(log_sum, logits.logsumexp(1))
        here = (wanted >= first_id) & (wanted < first_id + logits.shape[1])
        chosen[here] = logits[here, wanted[here] - first_id]
    return log_sum - chosen


def hidden_states(model: Model, windows: Tensor, rows: Tensor | None = None) -> Entry:
    """What the head reads, for windows int64 [N, L] side by side: all N * L rows, or some of them."""
    count, length = windows.shape
    positions = torch.arange(length).repeat(count)

    def attend(layer: int, qkv: Product, cos: Tensor, sin: Tensor) -> Tensor:
        spec, dim = model.spec, model.spec.head_dim
        parts = torch.split(to_dense(qkv, model.dtype), [spec.num_heads * dim, spec.num_kv_heads * dim, spec.num_kv_heads * dim], dim=-1)
        q, k, v = (part.reshape(count * length, -1, dim) for part in parts)
        q, k = rotary(q, k, cos, sin)
        q, k, v = (part.view(count, length, -1, dim).transpose(1, 2).float() for part in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(count * length, -1).to(model.dtype)

    x, residual = model.decoder.forward(windows.view(-1), positions, attend)
    if rows is not None:
        x, residual = x.index_select(0, rows), residual.index_select(0, rows)
    return model.decoder.final_norm(x, residual)


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
        for name, rows in windows.items():
            loss = mean_loss(model, rows)
            base.setdefault(name, loss)
            change = torch.tensor(loss - base[name]).exp().item() - 1
            print(
                f"{kind:6} {name}: perplexity {torch.tensor(loss).exp().item():.4f}, {change:+.2%} against {options.kinds[0]}", flush=True
            )


if __name__ == "__main__":
    main()
