"""Ties among a greedy row's rounded logits: found by the torch sampler, and settled by the logits before they were rounded.

A bf16 logit between 16 and 32 is a multiple of 1/8, so that several tokens often share the largest. Rounding keeps the
order of what it does not make equal: the largest unrounded logit is always among them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from batchinfer.layers.lm_head import LmHead
from batchinfer.ops.draw import MOST_TIES, Drawn, Ties
from batchinfer.ops.rows import Entry


def settle(drawn: Drawn, hidden: Entry, head: LmHead) -> Drawn:
    """Give rows with a tie the token whose logit from hidden [R, H] is the largest; of equal ones the lowest id."""
    ties = drawn.ties
    if not len(ties.rows):
        return drawn
    assert isinstance(hidden, Tensor)
    logits = head.unrounded(hidden, ties).cpu().numpy()
    order = np.lexsort((ties.token_ids, -logits, ties.rows))
    tied, first = np.unique(ties.rows[order], return_index=True)
    drawn.token_ids[tied] = ties.token_ids[order[first]]
    return drawn


class NoTies:
    """For rows that have none, or whose ties are real."""

    def take(self, first_id: int, logits: Tensor, largest: Tensor, best: Tensor) -> None:
        """Nothing to note."""

    def finish(self, best: Tensor) -> Ties:
        """No ties."""
        return Ties()


class TiedIds:
    """Collects, slice by slice, the tokens that share the largest logit of the rows chosen by `greedy`, bool [R]."""

    def __init__(self, greedy: Tensor) -> None:
        self._greedy = greedy
        self._found: list[tuple[Tensor, Tensor, Tensor]] = []  # row, token id, logit of each

    def take(self, first_id: int, logits: Tensor, largest: Tensor, best: Tensor) -> None:
        """Note which of logits float32 [R, N] are the largest of all so far; `largest` [R] of these, `best` [R] of all."""
        rows = (self._greedy & (largest == best)).nonzero().squeeze(1)
        equal = logits[rows] == best[rows, None]
        if int(equal.sum()) > MOST_TIES * len(rows):  # hardly ever: logits that are all alike
            equal &= equal.cumsum(1) <= MOST_TIES
        of, place = equal.nonzero().unbind(1)
        self._found.append((rows[of], first_id + place, best[rows[of]]))

    def finish(self, best: Tensor) -> Ties:
        """The ties of rows whose largest logits, float32 [R], are finite."""
        if not self._found:
            return Ties()
        rows, token_ids, logits = (torch.cat(parts) for parts in zip(*self._found, strict=True))
        lasting = ((logits == best[rows]) & logits.isfinite()).nonzero().squeeze(1)
        held, ids, values = (x[lasting].cpu().numpy() for x in (rows, token_ids, logits))
        order = np.argsort(held, kind="stable")  # slices came in ascending order, and so do ids within a row
        _, start, count = np.unique(held[order], return_index=True, return_counts=True)
        rank = np.arange(len(held)) - np.repeat(start, count)
        tied = order[np.repeat(count > 1, count) & (rank < MOST_TIES)]
        return Ties(held[tied], ids[tied], values[tied])
