"""Checkpoint tensors to a decoder: fuse parts, pack, let go. One layer's originals are alive at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchinfer.layers.kinds import LinearKind
from batchinfer.layers.linear import DENSE, Linear, fuse
from batchinfer.layers.lm_head import LmHead, slice_widths
from batchinfer.layers.prepared import Prepared
from batchinfer.model.config import ModelConfig
from batchinfer.model.decoder import Decoder, LayerWeights
from batchinfer.model.rotary import RotaryTable
from batchinfer.ops.layouts import Layout
from batchinfer.ops.table import Ops

NORMS = ("attn_norm", "mlp_norm")
LINEARS = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}  # as they run: of which parts
TABLE = DENSE


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

    @property
    def shares_table(self) -> bool:
        """True when a head that is tied to the embeddings is packed from their table as it is."""
        return self.linear.name == "none"


Piece = tuple[str, Prepared]
"""A name such as `embed`, `layers.3.qkv` or `head.0`, and its weight; tables and norms are of the form `TABLE`."""


def assemble(config: ModelConfig, weights: Iterable[tuple[str, Tensor]], place: Placement, num_positions: int) -> tuple[Decoder, LmHead]:
    """Consume `weights` (canonical names, layer by layer) and return (decoder, LM head)."""
    return join(config, prepare(weights, place), place, num_positions)


def prepare(weights: Iterable[tuple[str, Tensor]], place: Placement) -> Iterator[Piece]:
    """Every piece of the model, in the order of loading. One layer's originals are alive at a time.

    A head that is the table of embeddings once more, in the same numbers, is no piece.
    """
    top: dict[str, Tensor] = {}
    parts: dict[str, Tensor] = {}
    number = 0
    for name, tensor in weights:
        stem, _, rest = name.partition(".")
        if stem != "layers":
            top[stem] = tensor.to(place.device)
            continue
        layer, _, part = rest.partition(".")
        if int(layer) != number:
            yield from _layer_pieces(number, parts, place)
            parts, number = {}, int(layer)
        parts[part] = tensor.to(device=place.device, dtype=place.linear.weight_dtype)
    yield from _layer_pieces(number, parts, place)
    parts = {}
    yield "embed", _table(top["embed"].to(place.dtype))
    yield "norm", _table(top["norm"].to(place.norm_dtype))
    if "head" not in top and place.shares_table:
        return
    head = top.get("head", top["embed"])
    for index, part_of_head in enumerate(torch.split(head, slice_widths(len(head)))):
        yield f"head.{index}", place.linear.head_pack.prepare(part_of_head.to(place.linear.weight_dtype), None)


def _layer_pieces(number: int, parts: dict[str, Tensor], place: Placement) -> Iterator[Piece]:
    for norm in NORMS:
        yield f"layers.{number}.{norm}", _table(parts[f"{norm}.weight"].to(place.norm_dtype))
    for name, members in LINEARS.items():
        weight, bias = fuse([parts[f"{n}.weight"] for n in members], [parts.get(f"{n}.bias") for n in members])
        yield f"layers.{number}.{name}", place.linear.pack.prepare(weight, bias)


def _table(tensor: Tensor) -> Prepared:
    return Prepared(TABLE, {"weight": tensor})


def join(config: ModelConfig, pieces: Iterable[Piece], place: Placement, num_positions: int) -> tuple[Decoder, LmHead]:
    """(decoder, LM head) of a model's pieces, each finished as it comes."""
    top: dict[str, Tensor] = {}
    layers: list[dict[str, Any]] = []
    head: list[Layout] = []
    for name, piece in pieces:
        stem, _, rest = name.partition(".")
        if stem == "head":
            head.append(piece.finish())
        elif stem == "layers":
            number, _, part = rest.partition(".")
            if int(number) == len(layers):
                layers.append({})
            layers[-1][part] = piece.tensors["weight"] if part in NORMS else Linear(piece.finish(), place.ops)
        else:
            top[stem] = piece.tensors["weight"]
    embed = top["embed"]
    table = embed if config.tied_head else None
    lm_head = (
        LmHead.of_layouts(head, config.vocab_size, place.linear, place.ops, table)
        if head
        else LmHead(embed, place.linear, place.ops, table)
    )
    rotary = RotaryTable(config.rotary, config.head_dim, num_positions, place.device)
    return Decoder(embed, [LayerWeights(**layer) for layer in layers], top["norm"], config.norm_eps, rotary, place.ops), lm_head
