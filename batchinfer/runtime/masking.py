"""Token masks on logits: what a structure forbids becomes -infinity."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from batchinfer.runtime.grammar import unpacked

_NO_ROWS = np.empty(0, np.int64)


class MaskEdit:
    """Masks of some logit rows, as bits.

    Where a single token is allowed, its logit becomes 0 whatever else was done to it: what cannot be otherwise is no
    matter of bans or penalties.
    """

    def __init__(self, rows: np.ndarray, bits: np.ndarray, vocab_size: int) -> None:
        """`bits[i]` int32 [words] are the tokens that rows[i] may say, the lowest bit of the first word being token 0."""
        self.moved = _NO_ROWS
        one, token_ids = only_tokens(bits)
        self._forced_rows, self._forced_ids = rows[one], token_ids[one]
        self._rows = rows[~one]
        self._banned = torch.from_numpy(~unpacked(bits[~one], vocab_size))

    def touches(self, first_id: int, width: int) -> bool:
        """There is hardly a slice that holds none of what is forbidden."""
        return True

    def change(self, first_id: int, logits: Tensor) -> None:
        """Write -infinity."""
        if len(self._rows):
            banned = self._banned[:, first_id : first_id + logits.shape[1]].to(logits.device)
            if len(self._rows) == len(logits):
                logits[:, : banned.shape[1]].masked_fill_(banned, -torch.inf)
            else:
                rows = torch.from_numpy(self._rows).to(logits.device)
                part = logits[rows]
                part[:, : banned.shape[1]].masked_fill_(banned, -torch.inf)
                logits[rows] = part
        if len(self._forced_rows):
            logits[torch.from_numpy(self._forced_rows).to(logits.device)] = -torch.inf
            here = (self._forced_ids >= first_id) & (self._forced_ids < first_id + logits.shape[1])
            rows, columns = (torch.from_numpy(x[here]).to(logits.device) for x in (self._forced_rows, self._forced_ids - first_id))
            logits[rows, columns] = 0.0


def only_tokens(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(whether a row of bits allows exactly one token, bool [N]; that token's id, int64 [N])."""
    words = bits.view(np.uint32)
    used = words != 0
    where = used.argmax(1)
    word = words[np.arange(len(words)), where]
    one = (used.sum(1) == 1) & ((word & (word - 1)) == 0)
    token_ids: np.ndarray = where * 32 + np.log2(np.maximum(word, 1)).astype(np.int64)
    return one, token_ids
