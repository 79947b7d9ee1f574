"""What becomes of prompts that are too long: an error, left out, or cut to the token.

A cut prompt leaves room for its answer: `max_model_len` less the row's `max_tokens`, of which at most half the context
counts. Token ids and raw prompts lose tokens of their own; what the tokenizer adds (BOS) stays. A conversation loses
tokens of what was said, never of the template, the system message or a beginning that the answer goes on with, so that
every turn keeps its marks and the prompt still asks for an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from batchinfer.core.request import SamplingParams
from batchinfer.errors import InputError

ERROR, SKIP, LEFT, RIGHT, MIDDLE = "error", "skip", "truncate-left", "truncate-right", "truncate-middle"
CUTS = (LEFT, RIGHT, MIDDLE)
SKIPPED = "skipped"  # the error code of a row that was left out on request
TOO_LONG = "too_long"
OPEN, CLOSE = "\ue0b6", "\ue0b7"  # private-use characters around what was said
NEVER_CUT = ("system", "developer")


@dataclass(frozen=True, slots=True)
class PlacedTokens:
    """A text's tokens with the characters that they stand for, int32 [n] each; `added` by the tokenizer, bool [n]."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    added: np.ndarray


class PlacingTokenizer(Protocol):
    """A tokenizer that knows where tokens come from."""

    def encode_placed(self, text: str, add_special_tokens: bool) -> PlacedTokens:
        """The text's tokens with their places."""


class Cutter:
    """Deals with prompts of `limit` tokens and more."""

    def __init__(self, policy: str, limit: int, tokenizer: PlacingTokenizer) -> None:
        self.limit = limit
        self.cuts = policy in CUTS
        self._policy = policy
        self._tokenizer = tokenizer

    def refuse(self, tokens: str) -> InputError:
        """The error of a prompt that is not cut; `tokens` says how long it is."""
        said = f"the prompt is {tokens} tokens long; max_model_len is {self.limit:,}, answer included"
        return InputError(said, SKIPPED if self._policy == SKIP else TOO_LONG)

    def room(self, params: SamplingParams) -> int:
        """Tokens that a cut prompt keeps."""
        return max(1, self.limit - min(params.max_tokens, self.limit // 2))

    def cut_ids(self, ids: np.ndarray, params: SamplingParams) -> np.ndarray:
        """A prompt given as ids, cut; int32."""
        cut: np.ndarray = ids[self._kept(np.ones(len(ids), bool), params)]
        return cut

    def cut_text(self, text: str, params: SamplingParams) -> tuple[np.ndarray, int]:
        """A raw prompt's ids, cut, and how many are gone."""
        placed = self._tokenizer.encode_placed(text, add_special_tokens=True)
        return self._cut(placed, ~placed.added, params)

    def cut_chat(
        self, messages: list[dict[str, Any]], prefilled: bool, render: Callable[[list[dict[str, Any]]], str], params: SamplingParams
    ) -> tuple[np.ndarray, int]:
        """A conversation's ids, cut inside what was said, and how many are gone. `prefilled`: the last message stays whole."""
        text = render(messages)
        spans = said_in(text, messages, prefilled, render)
        placed = self._tokenizer.encode_placed(text, add_special_tokens=False)
        inside = np.zeros(len(placed.ids), bool)
        for start, end in spans:
            inside |= (placed.starts >= start) & (placed.ends <= end) & (placed.ends > placed.starts)
        return self._cut(placed, inside, params)

    def _cut(self, placed: PlacedTokens, removable: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, int]:
        if len(placed.ids) < self.limit:
            return placed.ids, 0
        kept = self._kept(removable, params)
        return placed.ids[kept], len(kept) - int(kept.sum())

    def _kept(self, removable: np.ndarray, params: SamplingParams) -> np.ndarray:
        """Mask of the tokens that stay."""
        surplus = len(removable) - self.room(params)
        places = np.flatnonzero(removable)
        if surplus > len(places):
            raise InputError(
                f"the prompt is {len(removable):,} tokens long, and {len(removable) - len(places):,} of them cannot be cut (template, "
                f"system message); max_model_len is {self.limit:,}, answer included",
                TOO_LONG,
            )
        first = {LEFT: 0, RIGHT: len(places) - surplus, MIDDLE: (len(places) - surplus) // 2}[self._policy]
        kept = np.ones(len(removable), bool)
        kept[places[first : first + surplus]] = False
        return kept


def said_in(
    text: str, messages: list[dict[str, Any]], prefilled: bool, render: Callable[[list[dict[str, Any]]], str]
) -> list[tuple[int, int]]:
    """Where in the rendered `text` the contents of messages stand that may be cut: (start, end) in characters.

    Found by rendering once more with marks around the contents. Where a template changes what it is given, so that this
    comes out otherwise, nothing may be cut.
    """
    if any(mark in str(message["content"]) for message in messages for mark in (OPEN, CLOSE)):
        return []
    last = len(messages) - 1
    marked = [
        message if message["role"] in NEVER_CUT or (prefilled and index == last) else {**message, "content": _marked(message["content"])}
        for index, message in enumerate(messages)
    ]
    spans: list[tuple[int, int]] = []
    parts: list[str] = []
    length, opened = 0, None
    rendered = render(marked)
    at = 0
    while at < len(rendered):
        ends = [place for mark in (OPEN, CLOSE) if (place := rendered.find(mark, at)) >= 0]
        end = min(ends, default=len(rendered))
        parts.append(rendered[at:end])
        length += end - at
        if end < len(rendered):
            if rendered[end] == OPEN:
                opened = length
            elif opened is not None:
                spans.append((opened, length))
                opened = None
        at = end + 1
    return spans if "".join(parts) == text else []


def _marked(content: str) -> str:
    core = content.strip()  # what a template trims is still at the edge
    if not core:
        return content
    start = content.index(core)
    return content[:start] + OPEN + core + CLOSE + content[start + len(core) :]
