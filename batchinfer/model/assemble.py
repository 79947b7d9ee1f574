"""Checkpoint tensors to a decoder: fuse parts, cast, pack, let go. One layer's originals are alive at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.layers.linear import Linear, Pack, fuse
from batchinfer.model.config import ModelConfig
from batchinfer.model.decoder import Decoder, DecoderShape, LayerWeights
from batchinfer.model.rotary import RotaryTable
from batchinfer.ops.table import Ops

QKV, GATE_UP = ("q", "k", "v"), ("gate", "up")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how weights live in this run."""

    dtype: torch.dtype
    device: torch.device
    pack: Pack
    ops: Ops


def assemble(config: ModelConfig, weights: Iterator[tuple[str, Tensor]], place: Placement, num_positions: int) -> tuple[Decoder, Linear]:
    """Consume `weights` (canonical names, layer by layer) and return (decoder, LM head)."""
    top: dict[str, Tensor] = {}
    layers: list[LayerWeights] = []
    parts: dict[str, Tensor] = {}
    for name, tensor in weights:
        stem, _, rest = name.partition(".")
        if stem != "layers":
            top[name] = tensor.to(device=place.device, dtype=place.dtype)
            continue
        number, _, part = rest.partition(".")
        if int(number) != len(layers):
            layers.append(_layer(parts, place))
            parts = {}
        parts[part] = tensor.to(device=place.device, dtype=place.dtype)
    layers.append(_layer(parts, place))
    embed = top["embed.weight"]
    head = Linear(place.pack(top.get("head.weight", embed), None), place.ops)
    shape = DecoderShape(config.num_heads, config.num_kv_heads, config.head_dim, config.norm_eps)
    rotary = RotaryTable(config.rotary, config.head_dim, num_positions, place.device)
    return Decoder(shape, embed, layers, top["norm.weight"], rotary, place.ops), head


def _layer(parts: dict[str, Tensor], place: Placement) -> LayerWeights:
    def linear(*names: str) -> Linear:
        weight, bias = fuse([parts[f"{n}.weight"] for n in names], [parts.get(f"{n}.bias") for n in names])
        return Linear(place.pack(weight, bias), place.ops)

    return LayerWeights(
        attn_norm=parts["attn_norm.weight"],
        qkv=linear(*QKV),
        o=linear("o"),
        mlp_norm=parts["mlp_norm.weight"],
        gate_up=linear(*GATE_UP),
        down=linear("down"),
    )
