"""Rows that add to some tokens' logits (`logit_bias`), and rows that may not say some words (`bad_words`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from batchinfer.core.sequences import Sequence, SequenceTable
from batchinfer.runtime.logits import AskingSlots, Ban, LogitEdit, Pairs

Encode = Callable[[str], list[int]]
"""Token ids of a text, without special tokens around it."""

KEPT_LISTS = 1024  # distinct lists of bad words whose tokens are remembered


class Bias:
    """Adds a number to some of a row's logits."""

    def __init__(self, rows: np.ndarray, token_ids: np.ndarray, amounts: np.ndarray) -> None:
        """int64 [N], int64 [N], float32 [N]; no pair of row and token comes twice."""
        self.moved = np.unique(rows)
        self._pairs = Pairs(rows, token_ids)
        self._amounts = amounts[self._pairs.order]

    def touches(self, first_id: int, width: int) -> bool:
        """True for slices with a token that is favoured or disfavoured."""
        return self._pairs.any_within(first_id, width)

    def change(self, first_id: int, logits: Tensor) -> None:
        """Add."""
        which = self._pairs.within(first_id, logits.shape[1])
        where = self._pairs.places(which, first_id, logits.device)
        logits[where] += torch.from_numpy(self._amounts[which]).to(logits.device)


class LogitBias:
    """Rows with `logit_bias`."""

    def __init__(self, table: SequenceTable) -> None:
        self._asking = AskingSlots(table.num_slots)
        self._biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # slot -> token ids, amounts

    def admit(self, seq: Sequence) -> None:
        """Note what the row asks for."""
        bias = seq.request.params.logit_bias
        if bias:
            self._asking.add(seq.slot)
            self._biases[seq.slot] = np.array([i for i, _ in bias], np.int64), np.array([x for _, x in bias], np.float32)

    def forget(self, slots: np.ndarray) -> None:
        """These rows leave."""
        for slot in self._asking.drop(slots).tolist():
            del self._biases[slot]

    def edits(self, slots: np.ndarray, places: np.ndarray) -> tuple[LogitEdit, ...]:
        """The same at every place."""
        rows = self._asking.among(slots)
        if not len(rows):
            return ()
        found = [self._biases[slot] for slot in slots[rows].tolist()]
        owners = np.repeat(rows, [len(ids) for ids, _ in found])
        return (Bias(owners, np.concatenate([ids for ids, _ in found]), np.concatenate([amounts for _, amounts in found])),)


def spellings(words: tuple[str, ...], encode: Encode) -> tuple[tuple[int, ...], ...]:
    """The token sequences that say the words, at the start of a text and after a space.

    The form after a space counts where it begins with another token and is as long: else the space is a token of its
    own, and the word's plain form follows it (as vLLM reads `bad_words`).
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        plain = tuple(encode(word.lstrip()))
        if not plain:
            continue
        found.append(plain)
        spaced = tuple(encode(" " + word.lstrip()))
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return tuple(dict.fromkeys(found))


class BadWords:
    """Bans a word's last token where the answer ends with its others; a prompt's words are no beginning of it."""

    def __init__(self, table: SequenceTable, encode: Encode, vocab_size: int) -> None:
        self._table = table
        self._encode = encode
        self._vocab_size = vocab_size
        self._asking = AskingSlots(table.num_slots)
        self._known: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}
        self._words: dict[int, tuple[tuple[int, ...], ...]] = {}  # slot -> sequences

    def admit(self, seq: Sequence) -> None:
        """Find the words' tokens, once for each list of them."""
        words = seq.request.params.bad_words
        if not words:
            return
        if words not in self._known:
            if len(self._known) >= KEPT_LISTS:
                self._known.clear()
            found = spellings(words, self._encode)
            self._known[words] = tuple(ids for ids in found if max(ids) < self._vocab_size)
        self._asking.add(seq.slot)
        self._words[seq.slot] = self._known[words]

    def forget(self, slots: np.ndarray) -> None:
        """These rows leave."""
        for slot in self._asking.drop(slots).tolist():
            del self._words[slot]

    def edits(self, slots: np.ndarray, places: np.ndarray) -> tuple[LogitEdit, ...]:
        """A ban for every row that could end a word now."""
        rows = self._asking.among(slots)
        banned = [self._banned(int(slots[row]), int(places[row])) for row in rows.tolist()]
        return (Ban(rows, banned),) if any(banned) else ()

    def _banned(self, slot: int, place: int) -> list[int]:
        table, words = self._table, self._words[slot]
        longest = max((len(word) for word in words), default=1) - 1
        first = max(int(table.num_prompt[slot]), place - longest)
        said = tuple(table.tokens[slot, first:place].tolist())
        return [word[-1] for word in words if len(word) <= len(said) + 1 and said[len(said) + 1 - len(word) :] == word[:-1]]
