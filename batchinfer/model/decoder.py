"""The decoder as a function `(input_ids, positions, attend) -> hidden`. It knows nothing of caches, batches or devices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.attention.base import Attend
from batchinfer.layers.linear import Linear
from batchinfer.model.rotary import RotaryTable
from batchinfer.ops.table import Ops


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; q, k, v and gate, up are fused row-wise."""

    attn_norm: Tensor
    qkv: Linear
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes that the order of operations needs."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float


class Decoder:
    """Pre-norm decoder of the Llama kind (Touvron et al., arXiv:2302.13971)."""

    def __init__(self, shape: DecoderShape, embed: Tensor, layers: list[LayerWeights], norm: Tensor, rotary: RotaryTable, ops: Ops) -> None:
        self.layers = layers
        self._shape = shape
        self._embed = embed  # [V, H]
        self._norm = norm
        self._rotary = rotary
        self._ops = ops

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """input_ids, positions int64 [T] -> (last layer's output, its residual), each [T, H]; `final_norm` joins them."""
        ops, eps = self._ops, self._shape.norm_eps
        cos, sin = self._rotary.at(positions)
        residual = self._embed.index_select(0, input_ids)
        x = ops.rms_norm(residual, self.layers[0].attn_norm, eps)
        for index, layer in enumerate(self.layers):
            if index:
                x, residual = ops.add_rms_norm(x, residual, layer.attn_norm, eps)
            q, k, v = self._heads(layer.qkv(x))
            q, k = ops.rotary(q, k, cos, sin)
            x = layer.o(attend(index, q, k, v))
            x, residual = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = layer.down(ops.silu_and_mul(layer.gate_up(x)))
        return x, residual

    def final_norm(self, x: Tensor, residual: Tensor) -> Tensor:
        """Hidden states [R, H] that the LM head reads."""
        return self._ops.add_rms_norm(x, residual, self._norm, self._shape.norm_eps)[0]

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = self._shape
        q, k, v = torch.split(qkv, [s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim, s.num_kv_heads * s.head_dim], dim=-1)
        rows = qkv.shape[0]
        return (
            q.reshape(rows, s.num_heads, s.head_dim),
            k.reshape(rows, s.num_kv_heads, s.head_dim),
            v.reshape(rows, s.num_kv_heads, s.head_dim),
        )
