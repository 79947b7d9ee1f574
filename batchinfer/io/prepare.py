"""Rows to requests, a batch at a time: render, tokenise all at once, check lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import numpy as np

from batchinfer.core.request import Request, Result, SamplingParams
from batchinfer.core.vocabulary import Vocabulary
from batchinfer.errors import InputError
from batchinfer.io.record import InputRow
from batchinfer.io.rows import Ask

BATCH_ROWS = 256
BATCH_BYTES = 4 << 20


class TextTokenizer(Protocol):
    """What the preparer asks of a tokenizer."""

    @property
    def vocabulary(self) -> Vocabulary:
        """What the ids say."""

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> Sequence[Sequence[int]]:
        """Token ids of each text."""

    def min_tokens_of(self, text: str) -> int:
        """A number of tokens that the text is sure to reach, found without tokenising it."""

    def render_chat(self, messages: list[dict[str, Any]], *, date: datetime | None = None, add_generation_prompt: bool = True) -> str:
        """The messages as the model's chat template writes them."""


class RowShape(Protocol):
    """Turns a row's values into what it asks for."""

    def read(self, values: dict[str, Any]) -> Ask:
        """What the row asks for, or `InputError`."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """How prompts become text, the same for every row of a job."""

    chat: bool
    system_prompt: str | None
    date: datetime
    max_model_len: int
    id_columns: tuple[str, ...] = ("custom_id", "id")  # the first one that a row has names it in messages


@dataclass(slots=True)
class _Pending:
    """A row on its way through a batch: its text, and whether special tokens are to be added."""

    index: int
    row: InputRow
    params: SamplingParams
    text: str
    raw_prompt: bool


class RowPreparer:
    """Turns batches of parsed rows into requests or failed results, in the same order."""

    def __init__(self, shape: RowShape, tokenizer: TextTokenizer, rendering: Rendering) -> None:
        self._shape = shape
        self._tokenizer = tokenizer
        self._rendering = rendering
        self.first_text: str | None = None

    def prepare(self, rows: list[InputRow]) -> list[Request | Result]:
        """A request or a failed result for each row."""
        made: list[Request | Result | None] = [None] * len(rows)
        pending: list[_Pending] = []
        for index, row in enumerate(rows):
            num_given = 0
            try:
                if row.error is not None:
                    raise row.error
                assert row.values is not None
                ask = self._shape.read(row.values)
                if ask.token_ids is not None:
                    num_given = len(ask.token_ids)
                if ask.token_ids is not None:
                    made[index] = self._request(row, ask.token_ids, ask.params)
                else:
                    pending.append(self._rendered(index, row, ask))
            except InputError as error:
                made[index] = self._failed(row, error, num_given)
            except RecursionError:
                made[index] = self._failed(row, InputError("the row is nested too deeply", "invalid_request"))
        for raw_prompt in (False, True):
            chosen = [item for item in pending if item.raw_prompt == raw_prompt]
            for item, ids in zip(chosen, self._encode(chosen, raw_prompt), strict=True):
                try:
                    if isinstance(ids, InputError):
                        raise ids
                    made[item.index] = self._request(item.row, np.array(ids, dtype=np.int32), item.params)
                except InputError as error:
                    made[item.index] = self._failed(item.row, error, 0 if isinstance(ids, InputError) else len(ids))
        return [item for item in made if item is not None]

    def _rendered(self, index: int, row: InputRow, ask: Ask) -> _Pending:
        rendering = self._rendering
        messages = ask.messages
        if messages is None and rendering.chat and not ask.raw:
            messages = [{"role": "user", "content": ask.prompt}]
        if messages is None:
            text = ask.prompt
        else:
            if rendering.system_prompt is not None and messages[0]["role"] != "system":
                messages = [{"role": "system", "content": rendering.system_prompt}, *messages]
            text = self._tokenizer.render_chat(messages, date=rendering.date)
        assert text is not None
        if len(text) > rendering.max_model_len:  # megabytes that cannot fit however they are cut are not tokenised
            at_least = self._tokenizer.min_tokens_of(text)
            if at_least >= rendering.max_model_len:
                raise _too_long(f"at least {at_least:,}", rendering.max_model_len)
        if self.first_text is None:
            self.first_text = text
        return _Pending(index, row, ask.params, text, raw_prompt=messages is None)

    def _encode(self, items: list[_Pending], add_special_tokens: bool) -> list[Sequence[int] | InputError]:
        if not items:
            return []
        try:
            return list(self._tokenizer.encode_batch([item.text for item in items], add_special_tokens))
        except InputError as error:  # one text spoils the batch: find out which
            if len(items) == 1:
                return [error]
            half = len(items) // 2
            return self._encode(items[:half], add_special_tokens) + self._encode(items[half:], add_special_tokens)

    def _request(self, row: InputRow, ids: np.ndarray, params: SamplingParams) -> Request:
        limit, size = self._rendering.max_model_len, self._tokenizer.vocabulary.size
        if len(ids) == 0:
            raise InputError("the prompt is empty: it has no tokens", "empty_prompt")
        if len(ids) >= limit:
            raise _too_long(f"{len(ids):,}", limit)
        highest = int(ids.max())
        if highest >= size:
            raise InputError(f"token id {highest} is beyond the vocabulary of {size:,} tokens", "invalid_token_id")
        return Request(row.position, ids, params)

    def _failed(self, row: InputRow, error: InputError, num_tokens: int = 0) -> Result:
        """The row's error, saying where the row stands unless the message does already."""
        place, message = row.place, str(error)
        if message.startswith(place):
            return Result.failed(row.position, error, num_tokens)
        values = row.values or {}
        known = next((values[name] for name in self._rendering.id_columns if values.get(name) is not None), None)
        where = place if known is None else f"{place} (id {known!r:.60})"
        return Result.failed(row.position, InputError(f"{where}: {message}", error.code), num_tokens)


def _too_long(tokens: str, limit: int) -> InputError:
    return InputError(f"the prompt is {tokens} tokens long; max_model_len is {limit:,}, answer included", "too_long")


def batches(rows: Iterable[InputRow]) -> Iterator[list[InputRow]]:
    """Group rows for the preparer, by number and, where rows are large, by bytes."""
    group: list[InputRow] = []
    size = 0
    for row in rows:
        group.append(row)
        size += len(row.raw)
        if len(group) >= BATCH_ROWS or size >= BATCH_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
