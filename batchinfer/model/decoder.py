"""The decoder as a function `(input_ids, positions, attend) -> hidden`. It knows nothing of caches, batches or devices."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from batchinfer.attention.base import Attend
from batchinfer.layers.linear import Linear
from batchinfer.model.rotary import RotaryTable
from batchinfer.ops.rows import Entry, Product
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


class Decoder:
    """Pre-norm decoder of the Llama kind (Touvron et al., arXiv:2302.13971)."""

    def __init__(self, embed: Tensor, layers: list[LayerWeights], norm: Tensor, norm_eps: float, rotary: RotaryTable, ops: Ops) -> None:
        self.layers = layers
        self.mapped_bytes = 0  # of weights that lie in a mapped file: memory which the system counts as free
        self._embed = embed  # [V, H]
        self._norm = norm
        self._eps = norm_eps
        self._rotary = rotary
        self._ops = ops

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> tuple[Product, Tensor]:
        """input_ids, positions int64 [T] -> (last layer's output, its residual), each [T, H]; `final_norm` joins them."""
        ops, eps = self._ops, self._eps
        cos, sin = self._rotary.at(positions)
        residual = self._embed.index_select(0, input_ids)
        x = ops.rms_norm(residual, self.layers[0].attn_norm, eps)
        for index, layer in enumerate(self.layers):
            out = layer.o(ops.enter(attend(index, layer.qkv(x), cos, sin)))
            x, residual = ops.add_rms_norm(out, residual, layer.mlp_norm, eps)
            out = layer.down(ops.silu_and_mul(layer.gate_up(x)))
            if index + 1 < len(self.layers):
                x, residual = ops.add_rms_norm(out, residual, self.layers[index + 1].attn_norm, eps)
        return out, residual

    def part(self, first: int, end: int) -> Decoder:
        """A decoder of the layers from `first` up to `end`, on the same weights."""
        return Decoder(self._embed, self.layers[first:end], self._norm, self._eps, self._rotary, self._ops)

    def final_norm(self, x: Product, residual: Tensor) -> Entry:
        """Hidden states [R, H] that the LM head reads."""
        return self._ops.add_rms_norm(x, residual, self._norm, self._eps)[0]
