"""What a row asks for: its prompt, in one of three forms, and its sampling parameters."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from batchinfer.core.request import PARAMETER_NAMES, SamplingParams
from batchinfer.errors import InputError, InputFileError
from batchinfer.io.chat_options import CHAT_FIELDS, PLAIN_CHAT, ChatOptions, ChatReader
from batchinfer.io.messages import clean_messages, without_nulls
from batchinfer.io.options import InputOptions
from batchinfer.io.params import ParamReader, map_parameters, plain_number, value_of_text
from batchinfer.io.prompt_template import ROW, PromptTemplate
from batchinfer.io.record import InputRow

PARAMS_COLUMN = "sampling_params"
NO_PROMPT = "no_prompt"


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that can hold a prompt; None: not looked at. A named one takes the place of all the others.

    With a template they are those that it uses.
    """

    prompt: str | None = "prompt"
    messages: str | None = "messages"
    token_ids: str | None = "prompt_token_ids"
    id: str | None = None
    template: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: InputOptions) -> Columns:
        """The columns to look at under these options."""
        if options.prompt_template is not None:
            return cls(None, None, None, options.id_column, PromptTemplate(options.prompt_template).columns)
        if options.prompt_column is None and options.messages_column is None:
            return cls(id=options.id_column)
        return cls(options.prompt_column, options.messages_column, None, options.id_column)

    @property
    def candidates(self) -> list[str]:
        """Names of all columns that can hold a prompt, or a part of one."""
        return [*(name for name in (self.prompt, self.messages, self.token_ids) if name is not None), *self.template]

    @property
    def any_column(self) -> bool:
        """True when a template may use any column."""
        return ROW in self.template


class Cells(StrEnum):
    """How a format writes what is not text: JSON says it itself; table cells hold lists also as JSON text; CSV is text alone."""

    JSON = "json"
    TABLE = "table"
    TEXT = "text"


@dataclass(slots=True)
class Ask:
    """A row's wish, one prompt form filled."""

    params: SamplingParams
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: np.ndarray | None = None
    raw: bool = False  # the prompt is never wrapped into a chat
    chat: ChatOptions = PLAIN_CHAT
    needs_chat: str | None = None  # the row asks for this, which only a rendered chat can have


def looks_like_openai(values: dict[str, Any]) -> bool:
    """True for a line of OpenAI's batch format."""
    return "custom_id" in values and "url" in values and "body" in values


def decide_shape(rows: list[InputRow], columns: Columns, input_name: str) -> str:
    """`plain` or `openai` by the first valid row; `InputFileError` when no row has a usable column."""
    found: dict[str, None] = {}
    for row in rows:
        if row.values is None:
            continue
        if looks_like_openai(row.values):
            return "openai"
        if columns.any_column or any(name in row.values for name in columns.candidates):
            return "plain"
        found.update(dict.fromkeys(row.values))
    wanted = " or ".join(repr(name) for name in columns.candidates)
    if found:
        names = ", ".join(list(found)[:20])
        raise InputFileError(
            f"{input_name}: no column {wanted} in the first {len(rows):,} rows; columns found: {names}; name one with --prompt-column"
        )
    first = next((row.error for row in rows if row.error is not None), None)
    if len(rows) == 1 and rows[0].error is None:
        raise InputFileError(f"{input_name}: no column {wanted}: its only row has no columns")
    what = "fits its header" if first is not None and first.code in ("wrong_columns", "invalid_csv") else "is a JSON object"
    raise InputFileError(f"{input_name}: none of the first {len(rows):,} rows {what}; {first}")


@dataclass(frozen=True, slots=True)
class Ways:
    """How plain rows become prompts, beyond their columns."""

    chat: ChatOptions = PLAIN_CHAT
    template: PromptTemplate | None = None


NO_WAYS = Ways()


class PlainRows:
    """Reads plain rows: columns to a prompt form and to parameters."""

    def __init__(
        self,
        columns: Columns,
        defaults: SamplingParams,
        row_params: bool = True,
        cells: Cells = Cells.JSON,
        ways: Ways = NO_WAYS,
    ) -> None:
        self._columns = columns
        self._chat = ChatReader(ways.chat)
        self._template = ways.template
        self._params = ParamReader(defaults)
        self._row_params = row_params
        self._cells = cells
        self._no_parameters = frozenset(columns.candidates) | {columns.id}  # a prompt column may be called `stop`

    def read(self, values: dict[str, Any]) -> Ask:
        """What the row asks for, or `InputError`."""
        ask = self._prompt(values)
        ask.chat = self._chat.defaults
        if self._row_params and self._chat.asks(values):
            given = self._given_chat(values)
            ask.chat = self._chat.read(given)
            ask.needs_chat = self._chat.chat_only(given)
        return ask

    def _given_chat(self, values: dict[str, Any]) -> dict[str, Any]:
        given = {name: values[name] for name in CHAT_FIELDS if name in values and name not in self._no_parameters}
        if self._cells is Cells.TABLE:
            return {name: without_nulls(value) for name, value in given.items()}
        return {name: value_of_text(name, value) for name, value in given.items()} if self._cells is Cells.TEXT else given

    def _prompt(self, values: dict[str, Any]) -> Ask:
        if self._template is not None:
            return Ask(self.params(values), prompt=self._template.render(values))
        if looks_like_openai(values) and not any(values.get(name) is not None for name in self._columns.candidates):
            raise InputError("an OpenAI batch line in a file of plain rows; put it into a file of its own", "wrong_shape")
        columns = self._columns
        prompt = values.get(columns.prompt) if columns.prompt is not None else None
        messages = values.get(columns.messages) if columns.messages is not None else None
        ids = values.get(columns.token_ids) if columns.token_ids is not None else None
        if messages is not None and (prompt is not None or ids is not None):
            other = columns.prompt if prompt is not None else columns.token_ids
            raise InputError(f"both {other} and {columns.messages} are given; a row has one of them", "ambiguous_prompt")
        if ids is not None:
            if self._cells is not Cells.JSON:
                ids = _from_json(ids, str(columns.token_ids))
            return Ask(self.params(values), token_ids=token_ids(ids, columns.token_ids))
        if prompt is not None:
            if not isinstance(prompt, str):
                raise InputError(f"{columns.prompt} must be a string, got {type(prompt).__name__}", "invalid_prompt")
            if not prompt:
                raise InputError(f"{columns.prompt} is empty", "empty_prompt")
            return Ask(self.params(values), prompt=prompt)
        if messages is not None:
            if self._cells is not Cells.JSON:
                messages = _from_json(messages, str(columns.messages))
            return Ask(self.params(values), messages=clean_messages(messages, str(columns.messages)))
        named = next((name for name in columns.candidates if name in values), None)
        if named is not None:
            raise InputError(f"{named} is null: there is no prompt", "empty_prompt")
        raise InputError(f"no prompt: the row has none of the columns {', '.join(columns.candidates)}", NO_PROMPT)

    def parameter_columns(self, values: dict[str, Any]) -> list[str]:
        """The row's columns that are taken as parameters."""
        if not self._row_params:
            return []
        known = (*CHAT_FIELDS, PARAMS_COLUMN)
        return [name for name in values if (name in PARAMETER_NAMES or name in known) and name not in self._no_parameters]

    def params(self, values: dict[str, Any]) -> SamplingParams:
        """The row's parameters over the job's; a column of its own wins over the same name in `sampling_params`."""
        if not self._row_params:
            return self._params.defaults
        given = {
            name: value
            for name, value in values.items()
            if value is not None and name in PARAMETER_NAMES and name not in self._no_parameters
        }
        inside = values.get(PARAMS_COLUMN)
        if inside is not None:
            given = {**self._inside(inside), **given}
        if self._cells is Cells.TABLE:
            given = {name: plain_number(value) for name, value in given.items()}
        elif self._cells is Cells.TEXT:
            given = {name: value_of_text(name, value) for name, value in given.items()}
        return self._params.read(given)

    def _inside(self, inside: Any) -> dict[str, Any]:
        if self._cells is not Cells.JSON:
            inside = _from_json(inside, PARAMS_COLUMN)
            if isinstance(inside, list) and all(isinstance(item, tuple) for item in inside):  # an Arrow map
                inside = map_parameters(inside)
        if not isinstance(inside, dict):
            raise InputError(f"{PARAMS_COLUMN} must be an object, got {type(inside).__name__}", "invalid_parameter")
        return inside


def _from_json(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise InputError(
            f"{name} holds text that is not JSON", "invalid_parameter" if name == PARAMS_COLUMN else "invalid_messages"
        ) from None


def token_ids(ids: Any, name: str | None) -> np.ndarray:
    """A prompt given as token ids, or `InputError`."""
    if not isinstance(ids, list | tuple) or not all(type(item) is int for item in ids):
        raise InputError(f"{name} must be a list of integers", "invalid_token_id")
    if not ids:
        raise InputError(f"{name} is empty", "empty_prompt")
    low, high = min(ids), max(ids)
    if low < 0 or high >= 2**31:
        raise InputError(f"{name} holds {low if low < 0 else high}; ids are from 0 to the vocabulary's size", "invalid_token_id")
    return np.array(ids, dtype=np.int32)
