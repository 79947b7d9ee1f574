"""The LM head: the product with the vocabulary, in slices that are consumed while they are in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from batchinfer.layers.kinds import LinearKind
from batchinfer.layers.linear import Linear
from batchinfer.layers.tiles import outputs_of
from batchinfer.ops.draw import Ties
from batchinfer.ops.layouts import Dense, Layout, OneDnnBf16, TileBf16
from batchinfer.ops.reference import onednn_bf16_remainder
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

    def __init__(self, weight: Tensor, kind: LinearKind, ops: Ops, table: Tensor | None = None) -> None:
        """Pack `weight` [V, H], a slice at a time; it may go afterwards, unless the layout keeps it as it is.

        `table`: the same weight in the run's dtype, where it is kept in any case (a head that is tied to the embeddings).
        """
        slices = torch.split(weight, slice_widths(len(weight)))
        self._take([kind.head_pack(part.to(kind.weight_dtype), None) for part in slices], len(weight), kind, ops, table)

    @classmethod
    def of_layouts(cls, layouts: list[Layout], vocab_size: int, kind: LinearKind, ops: Ops, table: Tensor | None) -> LmHead:
        """The head of slices (`slice_widths`) that were packed before; `table` as above."""
        head = cls.__new__(cls)
        head._take(layouts, vocab_size, kind, ops, table)
        return head

    def _take(self, layouts: list[Layout], vocab_size: int, kind: LinearKind, ops: Ops, table: Tensor | None) -> None:
        widths = slice_widths(vocab_size)
        assert len(layouts) == len(widths)
        self.vocab_size = vocab_size
        self.rounds = kind.weight_dtype is torch.bfloat16  # logits come in bf16: their spacing is 1/8 between 16 and 32
        self._table = table
        self._first_ids = [0, *accumulate(widths[:-1])]
        self._slices = [Linear(layout, ops) for layout in layouts]

    def slices(self, hidden: Entry, num_ids: int) -> Iterator[tuple[int, Product]]:
        """(first token id, logits of that and the following ids [R, width]) for hidden states [R, H], in ascending order.

        Slices without an id below `num_ids` are not computed.
        """
        for first_id, linear in zip(self._first_ids, self._slices, strict=True):
            if first_id < num_ids:
                yield first_id, linear(hidden)

    def unrounded(self, hidden: Tensor, ties: Ties) -> Tensor:
        """Logits float64 [N] of the pairs of `ties`, for hidden states [R, H] of a head that `rounds`.

        They are exact, but of a weight that oneDNN has packed, which gives 8 more bits. No pair changes a bit of another.
        """
        if self._table is not None:
            return _products(_take(hidden, ties.rows), _take(self._table, ties.token_ids))
        out = torch.empty(len(ties.rows), dtype=torch.float64, device=hidden.device)
        owner = np.searchsorted(self._first_ids, ties.token_ids, side="right") - 1
        for index in np.unique(owner).tolist():
            of = np.flatnonzero(owner == index)
            part = Ties(ties.rows[of], ties.token_ids[of] - self._first_ids[index], ties.logits[of])
            out[torch.from_numpy(of).to(out.device)] = _unrounded(self._slices[index].layout, hidden, part)
        return out

    def logits(self, hidden: Entry) -> Tensor:
        """All logits float32 [R, V]: for tests and small batches."""
        return torch.cat([to_dense(part, torch.float32).float() for _, part in self.slices(hidden, self.vocab_size)], dim=1)


def _unrounded(layout: Layout, hidden: Tensor, ties: Ties) -> Tensor:
    """As `LmHead.unrounded`, for token ids of one slice, counted from its first."""
    if isinstance(layout, Dense):
        return _products(_take(hidden, ties.rows), _take(layout.weight, ties.token_ids))
    if isinstance(layout, TileBf16):
        return _products(_take(hidden, ties.rows), outputs_of(layout, torch.from_numpy(ties.token_ids).long()))
    assert isinstance(layout, OneDnnBf16)
    rows, first, which = np.unique(ties.rows, return_index=True, return_inverse=True)
    rounded = torch.from_numpy(ties.logits[first]).to(hidden.dtype)
    remainder = onednn_bf16_remainder(_take(hidden, rows), layout, rounded)
    return torch.from_numpy(ties.logits).double() + remainder[torch.from_numpy(which), torch.from_numpy(ties.token_ids)].double()


def _take(x: Tensor, rows: np.ndarray) -> Tensor:
    return x.index_select(0, torch.from_numpy(rows).to(x.device))


def _products(x: Tensor, weight: Tensor) -> Tensor:
    """The inner products float64 [N] of x and weight bf16 [N, H], pair by pair; what is summed is exact."""
    return (x.double() * weight.double()).sum(1)
