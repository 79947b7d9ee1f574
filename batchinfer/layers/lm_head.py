"""The LM head: the product with the vocabulary, in slices that are consumed while they are in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor

from batchinfer.layers.kinds import LinearKind
from batchinfer.layers.linear import Linear
from batchinfer.ops.rows import Entry, Product, to_dense
from batchinfer.ops.table import Ops

SLICE_WIDTH = 8192  # logits of 256 rows are 4 to 8 MB; narrower slices cost small batches more in waiting for threads
MULTIPLE = 64  # of the vocabulary's entries in a slice: whole vectors, and whole blocks of the matrix kernels


def slice_widths(vocab_size: int) -> list[int]:
    """The vocabulary in near-equal parts of at most `SLICE_WIDTH` entries.

    The parts depend on the vocabulary alone, so that a logit is computed alike in every batch.
    """
    parts = -(-vocab_size // SLICE_WIDTH)
    width = -(-vocab_size // (parts * MULTIPLE)) * MULTIPLE
    return [min(width, vocab_size - first) for first in range(0, vocab_size, width)]


class LmHead:
    """Logits of hidden states, slice by slice; every slice's weight is packed for itself."""

    def __init__(self, weight: Tensor, kind: LinearKind, ops: Ops) -> None:
        """Pack `weight` [V, H], a slice at a time; it may go afterwards, unless the layout keeps it as it is."""
        widths = slice_widths(len(weight))
        self.vocab_size = len(weight)
        self._first_ids = [0, *accumulate(widths[:-1])]
        self._slices = [Linear(kind.head_pack(part.to(kind.weight_dtype), None), ops) for part in torch.split(weight, widths)]

    def slices(self, hidden: Entry, num_ids: int) -> Iterator[tuple[int, Product]]:
        """(first token id, logits of that and the following ids [R, width]) for hidden states [R, H], in ascending order.

        Slices without an id below `num_ids` are not computed.
        """
        for first_id, linear in zip(self._first_ids, self._slices, strict=True):
            if first_id < num_ids:
                yield first_id, linear(hidden)

    def logits(self, hidden: Entry) -> Tensor:
        """All logits float32 [R, V]: for tests and small batches."""
        return torch.cat([to_dense(part, torch.float32).float() for _, part in self.slices(hidden, self.vocab_size)], dim=1)
