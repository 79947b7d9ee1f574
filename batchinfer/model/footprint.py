"""How many bytes a model's weights take once they are packed, and how many more while they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

INT4_GROUP, INT4_OUT = 32, 16  # inputs that share a scale and an offset, and what outputs must be a multiple of (layers/int4.py)
BF16_BYTES, SCALE_BYTES = 2, 4


class Sizes(Protocol):
    """The sizes of a model that bear on its bytes (`model.config.ModelConfig` has them)."""

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def intermediate_size(self) -> int: ...  # noqa: D102
    @property
    def num_layers(self) -> int: ...  # noqa: D102
    @property
    def num_heads(self) -> int: ...  # noqa: D102
    @property
    def num_kv_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102


def layer_shapes(model: Sizes) -> list[tuple[int, int]]:
    """(out, in) of one layer's linear layers, fused as they run."""
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, inner = model.hidden_size, model.intermediate_size
    return [(queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)]


def linear_bytes(shape: tuple[int, int], quantization: str, item_bytes: int) -> int:
    """Bytes of one packed weight (out, in) of a layer, scales included; `item_bytes` are those of a number of the run's dtype."""
    out, size = shape
    if quantization == "int8":
        return out * (size + SCALE_BYTES)
    if quantization == "int4" and out % INT4_OUT == 0 and size % INT4_GROUP == 0:
        return out * size // 2 + out * (size // INT4_GROUP) * 2 * BF16_BYTES
    return out * size * item_bytes


def head_bytes(shape: tuple[int, int], quantization: str, item_bytes: int) -> int:
    """The same of a slice of the head, which has 8 bits where the layers have 4."""
    return linear_bytes(shape, "int8" if quantization == "int4" else quantization, item_bytes)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a model's weights. The table of embeddings stays in the run's dtype; a packed head is a copy of its own."""

    layers: int  # linear layers, head not counted
    head: int
    table: int  # embeddings
    packing: int  # what one layer, or the head, takes beside that while it is packed from its originals

    @classmethod
    def of(cls, model: Sizes, quantization: str, item_bytes: int, original_bytes: int, shares_table: bool = False) -> Footprint:
        """The footprint of a model whose weights are packed from numbers of `original_bytes`; `shares_table`: the head is the table."""
        from batchinfer.layers.lm_head import slice_widths

        shapes, size = layer_shapes(model), model.hidden_size
        largest = max(sum(out * inputs for out, inputs in shapes), model.vocab_size * size)
        return cls(
            layers=model.num_layers * sum(linear_bytes(shape, quantization, item_bytes) for shape in shapes),
            head=sum(head_bytes((width, size), quantization, item_bytes) for width in slice_widths(model.vocab_size)),
            table=0 if shares_table else model.vocab_size * size * item_bytes,
            packing=largest * original_bytes,
        )

    @property
    def held(self) -> int:
        """Bytes once everything is packed."""
        return self.layers + self.head + self.table

    @property
    def peak(self) -> int:
        """Bytes at the worst moment of loading."""
        return self.held + self.packing
