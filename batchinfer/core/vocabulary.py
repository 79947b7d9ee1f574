"""The tokenizer's facts that the control plane needs: bytes per token, special ids, EOS."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """What each token id says.

    `token_bytes[id]` are the bytes the id adds to a text (special tokens hold their own spelling; ids without a
    token are empty). Its length is the tokenizer's size: larger ids are never sampled and refused as input.
    """

    token_bytes: Sequence[bytes]
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    strip_leading_space: bool = False  # SentencePiece decoders drop one space before the first word
    byte_ids: frozenset[int] = frozenset()  # SentencePiece's tokens for single bytes; empty in byte-level vocabularies
    _spelled: np.ndarray = field(init=False, repr=False)  # token_bytes, object [V]
    _shown: np.ndarray = field(init=False, repr=False)  # the same with special tokens blank

    def __post_init__(self) -> None:
        """Blank the special tokens once, so that a text is joined without a test for each of its tokens."""
        spelled = np.empty(len(self.token_bytes), object)
        spelled[:] = self.token_bytes
        shown = spelled.copy()
        shown[[i for i in self.special_ids if i < len(shown)]] = b""
        object.__setattr__(self, "_spelled", spelled)
        object.__setattr__(self, "_shown", shown)

    @property
    def size(self) -> int:
        """Number of ids that the tokenizer knows."""
        return len(self.token_bytes)

    def text_bytes(self, token_ids: Collection[int] | np.ndarray, skip_special_tokens: bool = True) -> bytes:
        """Concatenated bytes of the tokens; ids outside the vocabulary add nothing. Fastest for an array of ids."""
        table = self._shown if skip_special_tokens else self._spelled
        ids = np.asarray(token_ids, np.int64)
        try:
            return b"".join(table[ids].tolist())
        except IndexError:  # only a caller's own ids can be outside: such ids are never sampled
            return b"".join(table[ids[ids < len(table)]].tolist())

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of the tokens as a whole text, as the tokenizer's own decoder gives it."""
        text = self.continuation(token_ids, skip_special_tokens)
        return text.removeprefix(" ") if self.strip_leading_space else text

    def continuation(self, token_ids: Iterable[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """Text that the tokens add to one before them: a leading space stays; bytes that are no UTF-8 become U+FFFD."""
        ids = token_ids if isinstance(token_ids, np.ndarray) else list(token_ids)
        raw = self.text_bytes(ids, skip_special_tokens)
        if not self.byte_ids:
            return raw.decode("utf-8", errors="replace")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return self._decode_runs(ids, skip_special_tokens)

    def _decode_runs(self, token_ids: Iterable[int], skip_special_tokens: bool) -> str:
        """As SentencePiece decoders do: a run of byte tokens that is no UTF-8 becomes one U+FFFD for each of its bytes."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        shown = [i for i in token_ids if i < self.size and i not in hidden]
        parts = []
        for is_bytes, run in groupby(shown, self.byte_ids.__contains__):
            raw = b"".join([self.token_bytes[i] for i in run])
            try:
                parts.append(raw.decode("utf-8"))
            except UnicodeDecodeError:
                parts.append("\ufffd" * len(raw) if is_bytes else raw.decode("utf-8", errors="replace"))
        return "".join(parts)
