"""Checkpoint tensors to a decoder: fuse parts, pack, let go. One layer's originals are alive at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.layers.kinds import LinearKind
from batchinfer.layers.linear import Linear, fuse
from batchinfer.layers.lm_head import LmHead
from batchinfer.model.config import ModelConfig
from batchinfer.model.decoder import Decoder, LayerWeights
from batchinfer.model.rotary import RotaryTable
from batchinfer.ops.table import Ops

QKV, GATE_UP = ("q", "k", "v"), ("gate", "up")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how weights live in this run."""

    dtype: torch.dtype
    device: torch.device
    linear: LinearKind
    ops: Ops

    @property
    def norm_dtype(self) -> torch.dtype:
        """Of norm weights: as the run's table of operations reads them."""
        return torch.float32 if self.linear.rows == "int8" else self.dtype


def assemble(config: ModelConfig, weights: Iterable[tuple[str, Tensor]], place: Placement, num_positions: int) -> tuple[Decoder, LmHead]:
    """Consume `weights` (canonical names, layer by layer) and return (decoder, LM head)."""
    top: dict[str, Tensor] = {}
    layers: list[LayerWeights] = []
    parts: dict[str, Tensor] = {}
    for name, tensor in weights:
        stem, _, rest = name.partition(".")
        if stem != "layers":
            top[name] = tensor.to(place.device)
            continue
        number, _, part = rest.partition(".")
        if int(number) != len(layers):
            layers.append(_layer(parts, place))
            parts = {}
        parts[part] = tensor.to(device=place.device, dtype=place.linear.weight_dtype)
    layers.append(_layer(parts, place))
    original, own = top["embed.weight"], top.get("head.weight")
    embed = original.to(place.dtype)
    head = LmHead(original, place.linear, place.ops, embed) if own is None else LmHead(own, place.linear, place.ops)
    norm = top["norm.weight"].to(place.norm_dtype)
    rotary = RotaryTable(config.rotary, config.head_dim, num_positions, place.device)
    decoder = Decoder(embed, layers, norm, config.norm_eps, rotary, place.ops)
    return decoder, head


def _layer(parts: dict[str, Tensor], place: Placement) -> LayerWeights:
    def linear(*names: str) -> Linear:
        weight, bias = fuse([parts[f"{n}.weight"] for n in names], [parts.get(f"{n}.bias") for n in names])
        return Linear(place.linear.pack(weight, bias), place.ops)

    return LayerWeights(
        attn_norm=parts["attn_norm.weight"].to(place.norm_dtype),
        qkv=linear(*QKV),
        o=linear("o"),
        mlp_norm=parts["mlp_norm.weight"].to(place.norm_dtype),
        gate_up=linear(*GATE_UP),
        down=linear("down"),
    )
