"""Token masks on logits: what a structure forbids becomes -infinity."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_NO_ROWS = np.empty(0, np.int64)
# What a byte of a mask adds to the logits of its 8 tokens, float32 [256, 8]: adding is many times as fast as a masked fill.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
PENALTIES = np.where(_BITS, np.float32(0.0), np.float32(-np.inf))


@dataclass(frozen=True, slots=True)
class Masks:
    """What logit rows may say, as bits, and for rows that may say one thing only which that is."""

    allowed: np.ndarray  # uint8 [N, bytes], the lowest bit of the first byte being token 0
    forced: np.ndarray  # bool [N]
    forced_ids: np.ndarray  # int64 [N]

    @classmethod
    def of(cls, bits: np.ndarray) -> Masks:
        """From bits int32 [N, words] of what is allowed."""
        return cls(bits.view(np.uint8), *only_tokens(bits))

    def at(self, rows: np.ndarray) -> Masks:
        """The masks of some rows."""
        return Masks(self.allowed[rows], self.forced[rows], self.forced_ids[rows])


class MaskEdit:
    """Masks of some logit rows.

    Where a single token is allowed, its logit becomes 0 whatever else was done to it: what cannot be otherwise is no
    matter of bans or penalties.
    """

    def __init__(self, rows: np.ndarray, masks: Masks) -> None:
        """`masks` are those of `rows`, int64 [N]."""
        self.moved = _NO_ROWS
        self._rows = rows
        self._allowed = masks.allowed
        self._forced_rows, self._forced_ids = rows[masks.forced], masks.forced_ids[masks.forced]

    def touches(self, first_id: int, width: int) -> bool:
        """There is hardly a slice that holds none of what is forbidden."""
        return True

    def change(self, first_id: int, logits: Tensor) -> None:
        """Write -infinity."""
        assert first_id % 8 == 0, "a slice begins within a byte of the masks"
        width = min(logits.shape[1], 8 * self._allowed.shape[1] - first_id)
        if width <= 0:
            return
        part = self._allowed[:, first_id // 8 : -(-(first_id + width) // 8)]
        penalty = torch.from_numpy(PENALTIES.take(part, axis=0).reshape(len(part), -1)[:, :width]).to(logits.device)
        if len(self._rows) == len(logits):
            logits[:, :width] += penalty
        else:
            logits[torch.from_numpy(self._rows).to(logits.device), :width] += penalty
        here = (self._forced_ids >= first_id) & (self._forced_ids < first_id + logits.shape[1])
        if here.any():
            at, columns = (torch.from_numpy(x[here]).to(logits.device) for x in (self._forced_rows, self._forced_ids - first_id))
            logits[at, columns] = 0.0


def only_tokens(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(whether a row of bits allows exactly one token, bool [N]; that token's id, int64 [N])."""
    words = bits.view(np.uint32)
    used = words != 0
    where = used.argmax(1)
    word = words[np.arange(len(words)), where]
    one = (used.sum(1) == 1) & ((word & (word - 1)) == 0)
    token_ids: np.ndarray = where * 32 + np.log2(np.maximum(word, 1)).astype(np.int64)
    return one, token_ids
