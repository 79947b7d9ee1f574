"""Rows to requests, a batch at a time: render, tokenise all at once, check lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Protocol

import numpy as np

from batchinfer.core.request import Request, Result, SamplingParams
from batchinfer.core.vocabulary import Vocabulary
from batchinfer.errors import InputError
from batchinfer.io.answers import PLAIN_READING, AnswerReader, Reading
from batchinfer.io.chat_options import PLAIN_CHAT, ChatOptions
from batchinfer.io.record import InputRow
from batchinfer.io.rows import Ask
from batchinfer.io.tool_choice import CallWriter
from batchinfer.io.truncate import ERROR, Cutter, PlacedTokens

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

    def encode_placed(self, text: str, add_special_tokens: bool) -> PlacedTokens:
        """The text's tokens with their places."""

    def render_chat(self, messages: list[dict[str, Any]], *, date: datetime | None = None, options: ChatOptions = PLAIN_CHAT) -> str:
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
    on_too_long: str = ERROR
    id_columns: tuple[str, ...] = ("custom_id", "id")  # the first one that a row has names it in messages


@dataclass(slots=True)
class _Pending:
    """A row on its way through a batch: its text, and the conversation that the text renders (None: a raw prompt)."""

    index: int
    row: InputRow
    ask: Ask
    text: str
    messages: list[dict[str, Any]] | None
    too_long: bool = False  # surely, though it was not tokenised


class RowPreparer:
    """Turns batches of parsed rows into requests or failed results, in the same order."""

    def __init__(
        self,
        shape: RowShape,
        tokenizer: TextTokenizer,
        rendering: Rendering,
        reader: AnswerReader | None = None,
        writer: CallWriter | None = None,
    ) -> None:
        self._shape = shape
        self._tokenizer = tokenizer
        self._rendering = rendering
        self._cutter = Cutter(rendering.on_too_long, rendering.max_model_len, tokenizer)
        self._reader = reader or AnswerReader(tokenizer.vocabulary)
        self._writer = writer or CallWriter()
        self._readings: dict[int, Reading] = {}  # by position, of rows under way
        self._cut_rows: set[int] = set()  # the same
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
                    made[index] = self._request_of_ids(row, ask)
                else:
                    pending.append(self._rendered(index, row, ask))
            except InputError as error:
                made[index] = self._failed(row, error, num_given)
            except RecursionError:
                made[index] = self._failed(row, InputError("the row is nested too deeply", "invalid_request"))
        for raw_prompt in (False, True):
            chosen = [item for item in pending if (item.messages is None) == raw_prompt]
            encoded = self._encode([item for item in chosen if not item.too_long], raw_prompt)
            for item in chosen:
                ids = None if item.too_long else encoded.pop(0)
                made[item.index] = self._finished(item, ids)
        return [item for item in made if item is not None]

    def _rendered(self, index: int, row: InputRow, ask: Ask) -> _Pending:
        rendering = self._rendering
        messages = ask.messages
        if messages is None and rendering.chat and not ask.raw:
            messages = [{"role": "user", "content": ask.prompt}]
        if messages is None:
            if ask.needs_chat is not None:
                raise InputError(f"{ask.needs_chat} needs a chat, and the prompt is sent raw", "unsupported_parameter")
            text = ask.prompt
        else:
            if rendering.system_prompt is not None and messages[0]["role"] != "system":
                messages = [{"role": "system", "content": rendering.system_prompt}, *messages]
            must_be = self._writer.structure(ask.chat)
            if must_be is not None:  # the call is the whole answer, whatever form other answers have
                ask.params = replace(ask.params, structured_outputs=must_be)
            text = self._tokenizer.render_chat(messages, date=rendering.date, options=ask.chat)
        assert text is not None
        too_long = False
        if len(text) > rendering.max_model_len:  # megabytes that cannot fit however they are cut are not tokenised
            at_least = self._tokenizer.min_tokens_of(text)
            too_long = at_least >= rendering.max_model_len
            if too_long and not self._cutter.cuts:
                raise self._cutter.refuse(f"at least {at_least:,}")
        if self.first_text is None:
            self.first_text = text
        return _Pending(index, row, ask, text, messages, too_long)

    def _finished(self, item: _Pending, ids: Sequence[int] | InputError | None) -> Request | Result:
        """The row's request, cut if need be; `ids` None for a text that is surely too long."""
        num_tokens = 0
        try:
            if isinstance(ids, InputError):
                raise ids
            if ids is not None:
                num_tokens = len(ids)
            if ids is None or (num_tokens >= self._cutter.limit and self._cutter.cuts):
                prompt_ids = self._cut(item)
            else:
                prompt_ids = np.array(ids, dtype=np.int32)
            request = self._request(item.row, prompt_ids, item.ask.params)
        except InputError as error:
            return self._failed(item.row, error, num_tokens)
        if item.messages is not None:
            chat = item.ask.chat
            reading = self._reader.reading_of(chat, item.text, item.ask.params.stop)
            if reading is not PLAIN_READING:
                self._readings[item.row.position] = reading
        return request

    def _cut(self, item: _Pending) -> np.ndarray:
        params, chat = item.ask.params, item.ask.chat
        if item.messages is None:
            ids, gone = self._cutter.cut_text(item.text, params)
        else:
            ids, gone = self._cutter.cut_chat(
                item.messages,
                chat.continue_final,
                lambda messages: self._tokenizer.render_chat(messages, date=self._rendering.date, options=chat),
                params,
            )
        if gone:
            self._cut_rows.add(item.row.position)
        return ids

    def reading_of(self, row: int) -> Reading:
        """How the answer of a row is to be read; told once."""
        return self._readings.pop(row, PLAIN_READING)

    def was_cut(self, row: int) -> bool:
        """Whether the row's prompt was cut; told once."""
        if row in self._cut_rows:
            self._cut_rows.discard(row)
            return True
        return False

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

    def _request_of_ids(self, row: InputRow, ask: Ask) -> Request:
        assert ask.token_ids is not None
        ids = ask.token_ids
        if ask.needs_chat is not None:
            raise InputError(f"{ask.needs_chat} needs a chat, and the prompt is given as token ids", "unsupported_parameter")
        if len(ids) >= self._cutter.limit and self._cutter.cuts:
            ids = self._cutter.cut_ids(ids, ask.params)
            self._cut_rows.add(row.position)
        return self._request(row, ids, ask.params)

    def _request(self, row: InputRow, ids: np.ndarray, params: SamplingParams) -> Request:
        size = self._tokenizer.vocabulary.size
        if len(ids) == 0:
            raise InputError("the prompt is empty: it has no tokens", "empty_prompt")
        if len(ids) >= self._cutter.limit:
            raise self._cutter.refuse(f"{len(ids):,}")
        highest = int(ids.max())
        if highest >= size:
            raise InputError(f"token id {highest} is beyond the vocabulary of {size:,} tokens", "invalid_token_id")
        if row.min_max_tokens > params.max_tokens:
            params = replace(params, max_tokens=row.min_max_tokens)
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
