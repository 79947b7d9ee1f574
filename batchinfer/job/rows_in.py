"""The input side of a job: which rows, in which shape, and how they become requests. `plan` walks the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, Any

from batchinfer.core.request import PARAMETER_NAMES, Request, Result, SamplingParams
from batchinfer.errors import ConfigError, InputError, InputFileError
from batchinfer.io.answers import REASONING_TAGS, Answer, AnswerReader
from batchinfer.io.chat_options import CHAT_FIELDS
from batchinfer.io.find import find_files
from batchinfer.io.join import KeptColumns, has_clash
from batchinfer.io.openai_rows import OpenAIRows, other_models
from batchinfer.io.options import InputOptions, Shard
from batchinfer.io.params import OPENAI_BASE, PLAIN_BASE, job_defaults
from batchinfer.io.prepare import Rendering, RowPreparer, batches
from batchinfer.io.prompt_template import PromptTemplate
from batchinfer.io.record import InputRow
from batchinfer.io.results import ResultColumns
from batchinfer.io.rows import PARAMS_COLUMN, Cells, Columns, PlainRows, Ways, decide_shape, looks_like_openai
from batchinfer.io.source import InputFiles, Source, open_source
from batchinfer.io.tool_choice import CallWriter

if TYPE_CHECKING:
    from batchinfer.build import ModelHandle

WINDOW_ROWS = 1000
WINDOW_BYTES = 64 << 20
ID_COLUMNS = ("custom_id", "id")


def find_input(options: InputOptions, output: str | None = None) -> InputFiles:
    """The files that a job reads; columns that can hold a prompt are text in all of them."""
    columns = Columns.of(options)
    return find_files(
        options.input, output, tuple(name for name in (columns.prompt, columns.messages, columns.token_ids) if name is not None)
    )


@dataclass(slots=True)
class RowStream:
    """The chosen rows of an input, opened and looked into: the first rows are held, the others not read yet."""

    source: Source
    files: InputFiles
    options: InputOptions
    result_columns: ResultColumns
    window: list[InputRow] = field(default_factory=list)
    start: int = 0  # position of the first chosen row
    stop: int | None = None  # position after the last one, None for the end of the input
    whole: bool = False  # the window holds every row
    shape: str = "plain"
    num_read: int = 0
    seconds: float = 0.0  # spent reading and parsing
    _num_held: int = 0
    _rest: Iterator[InputRow] = field(default_factory=lambda: iter(()))

    @classmethod
    def open(cls, files: InputFiles, options: InputOptions, result_columns: ResultColumns, kept: KeptColumns | None = None) -> RowStream:
        """Open the input and look at its first rows; raises when it can never be run.

        Table rows hold what prompts and parameters need and, where `kept` is given, the columns that it keeps.
        A shard is judged by the first rows of all: its own may be of another shape, and it belongs to the same job.
        """
        stream = cls(open_source(files), files, options, result_columns)
        stream.start, stream.stop = stream.chosen
        columns = Columns.of(options)
        if files.is_table:
            _check_table(stream.source, columns, options, result_columns)
            _use_columns(stream.source, columns, options, kept)
        stream._look()
        if stream.window:
            stream.shape = decide_shape(stream.window, columns, options.input)
            if stream.shape == "openai" and files.kind != "jsonl":
                raise InputFileError(f"{options.input}: OpenAI batch lines are read from JSONL only; write them as .jsonl")
            if stream.shape == "openai" and options.prompt_template is not None:
                raise ConfigError("--prompt-template is for plain rows; OpenAI batch lines hold their prompts")
            stream._expect_calls()
            stream._check_names()
        if options.shard is not None:
            stream._narrow(options.shard)
        return stream

    def _expect_calls(self) -> None:
        """Plain rows get a column of tool calls when the job or its first rows come with tools."""
        given = self.options.row_params and any(row.values is not None and row.values.get("tools") for row in self.window)
        if self.shape == "openai" or given or self.options.job_chat.tools:
            self.result_columns = replace(self.result_columns, tool_calls=True)

    @property
    def chosen(self) -> tuple[int, int | None]:
        """First position and end of the rows that offset and limit choose; a shard is a part of these."""
        offset, limit = self.options.offset, self.options.limit
        return offset, None if limit is None else offset + limit

    def _narrow(self, shard: Shard) -> None:
        """Look again, at the shard's rows alone. How many rows there are is counted first, for lines by reading them all."""
        self._rest = iter(())
        count = self._num_held if self.whole else self.source.count(self.start, self.stop)
        self.start, self.stop = shard.part_of(self.start, self.start + count)
        self.window, self.whole, self.num_read = [], False, 0
        self._look()

    @property
    def num_rows(self) -> int | None:
        """How many rows are chosen, where that is known."""
        if self.whole:
            return self._num_held
        total = self.source.num_rows
        if total is None:
            return None
        end = total if self.stop is None else min(self.stop, total)
        return max(0, end - self.start)

    def _look(self) -> None:
        rows = self._parsed(self.source.rows(self.start, self.stop))
        size = 0
        for row in rows:
            self.window.append(row)
            size += len(row.raw)
            if len(self.window) >= WINDOW_ROWS or size >= WINDOW_BYTES:
                break
        else:
            self.whole = True
        self._num_held = len(self.window)
        self._rest = rows

    def _parsed(self, rows: Iterable[InputRow]) -> Iterator[InputRow]:
        source, names = self.source, self.result_columns.reserved
        began = perf_counter()
        for row in rows:
            source.parse(row)
            if row.values is not None and has_clash(row.values, names) and not looks_like_openai(row.values):
                _refuse_clash(row, names)
            self.num_read += 1
            self.seconds += perf_counter() - began
            yield row
            began = perf_counter()

    def _check_names(self) -> None:
        named = self.options.id_column
        if named is not None and not any(row.values is not None and named in row.values for row in self.window):
            raise InputFileError(f"{self.options.input}: no column {named!r} (--id-column) in the first {len(self.window):,} rows")
        for row in self.window:
            if row.error is not None and row.error.code == "reserved_column":
                raise ConfigError(f"{self.options.input}: {row.error}; give --output-prefix to name the result columns otherwise")

    def rows(self) -> Iterator[InputRow]:
        """Every chosen row, parsed, in order; once."""
        first, self.window = self.window, []  # handed over: what was run is not held any longer
        return chain(_drained(first), self._rest)

    def fraction_read(self) -> float:
        """How far reading has come, 0 to 1."""
        if self.whole:
            return 1.0
        count = self.num_rows
        return min(1.0, self.num_read / count) if count else self.source.fraction_read()


def _drained(rows: list[InputRow]) -> Iterator[InputRow]:
    rows.reverse()
    while rows:
        yield rows.pop()


def _refuse_clash(row: InputRow, names: tuple[str, ...]) -> None:
    assert row.values is not None
    name = next(name for name in names if name in row.values)
    row.error = InputError(f"{row.place}: the column {name!r} has the name of a result column", "reserved_column")
    row.plain = False


def _check_table(source: Source, columns: Columns, options: InputOptions, results: ResultColumns) -> None:
    from batchinfer.io.column_types import check_column_types
    from batchinfer.io.table_source import TableSource

    assert isinstance(source, TableSource)
    types = source.column_types
    if looks_like_openai(dict.fromkeys(types)):
        raise InputFileError(f"{options.input}: OpenAI batch lines are read from JSONL only; write them as .jsonl")
    if not columns.any_column and not any(name in types for name in columns.candidates) and source.num_rows:
        wanted = " or ".join(repr(name) for name in columns.candidates)
        raise InputFileError(f"{options.input}: no column {wanted}; columns found: {', '.join(types)}; name one with --prompt-column")
    try:
        check_column_types(types, columns.prompt, columns.messages, columns.token_ids)
    except InputFileError as error:
        raise InputFileError(f"{options.input}: {error}") from None
    for name in results.reserved:
        if name in types:
            raise ConfigError(
                f"{options.input}: the column {name!r} has the name of a result column; give --output-prefix to name the result columns otherwise"
            )


def _use_columns(source: Source, columns: Columns, options: InputOptions, kept: KeptColumns | None) -> None:
    from batchinfer.io.table_source import TableSource

    assert isinstance(source, TableSource)
    names = list(source.column_types)
    wanted = {*columns.candidates, *ID_COLUMNS, PARAMS_COLUMN, *CHAT_FIELDS, *(PARAMETER_NAMES if options.row_params else ())}
    carried = kept.names(names) if kept is not None else ()
    source.use_columns([name for name in names if columns.any_column or name in wanted or name == columns.id or name in carried])


@dataclass(slots=True)
class JobRows:
    """Rows on their way to the engine."""

    stream: RowStream
    preparer: RowPreparer
    defaults: SamplingParams
    chat: bool
    notes: list[str]
    treatment: str  # how prompts become what the model reads, as a sentence
    parameter_columns: tuple[str, ...]
    reader: AnswerReader
    seconds: float = 0.0  # spent rendering and tokenising

    def prepared(self, rows: Iterable[InputRow], seen: Callable[[InputRow], None] | None = None) -> Iterator[Request | Result]:
        """A request or a failed result for each row, a batch at a time; `seen` hears of each row just before."""
        for batch in batches(rows):
            began = perf_counter()
            made = self.preparer.prepare(batch)
            if seen is not None:
                for row in batch:
                    seen(row)
            self.seconds += perf_counter() - began
            yield from made

    def forget(self, row: int) -> bool:
        """Let go of a row that will not run; whether its prompt was cut to fit."""
        self.preparer.reading_of(row)
        return self.preparer.was_cut(row)

    def answers_of(self, result: Result) -> list[Answer]:
        """The text of each answer of a row that has just ended, taken apart; none for a failed row."""
        reading = self.preparer.reading_of(result.row)
        if result.error is not None:
            return []
        if not result.choices:
            return [self.reader.read(result, reading)]
        return [self.reader.read(replace(result, text=choice.text, token_ids=choice.token_ids), reading) for choice in result.choices]


def open_rows(stream: RowStream, model: ModelHandle, sampling: dict[str, Any], date: datetime) -> JobRows:
    """Settle how this model is asked: chat or raw, defaults, parameters; `ConfigError` for what cannot be."""
    options, tokenizer = stream.options, model.tokenizer
    is_openai = stream.shape == "openai"
    columns = Columns.of(options)
    chat = tokenizer.has_chat_template if options.chat is None else options.chat
    if chat and not tokenizer.has_chat_template:
        raise ConfigError("--chat: this model has no chat template; use --no-chat")
    first = next((row.values for row in stream.window if row.values is not None), {})
    if options.system_prompt is not None and not chat and not is_openai and first.get(columns.messages or "") is None:
        raise ConfigError("--system-prompt needs a chat: prompts are used raw here, and have no place for it")
    defaults, notes = job_defaults(model.generation.defaults, sampling, OPENAI_BASE if is_openai else PLAIN_BASE)
    ids = (columns.id,) if columns.id is not None else ID_COLUMNS
    rendering = Rendering(chat, options.system_prompt, date, model.max_model_len, options.on_too_long, ids)
    notes = [*model.generation.notes, *notes]
    reader = _answer_reader(stream, model, notes)
    writer = CallWriter.of(tokenizer.tool_format, tokenizer.special_ids_of)
    if is_openai:
        preparer = RowPreparer(OpenAIRows(defaults, options.row_params, options.job_chat), tokenizer, rendering, reader, writer)
        treatment = "prompts: OpenAI lines; messages go through the chat template, completions are sent raw"
        return JobRows(stream, preparer, defaults, chat, notes, treatment, (), reader)
    treatment = _treatment(stream, columns, chat, tokenizer.has_chat_template)
    template = None if options.prompt_template is None else PromptTemplate(options.prompt_template)
    ways = Ways(options.job_chat, template)
    shape = PlainRows(columns, defaults, options.row_params, cells=_cells_of(stream.files), ways=ways)
    found: dict[str, None] = {}
    for row in stream.window:
        if row.values is not None:
            found.update(dict.fromkeys(shape.parameter_columns(row.values)))
    preparer = RowPreparer(shape, tokenizer, rendering, reader, writer)
    return JobRows(stream, preparer, defaults, chat, notes, treatment, tuple(found), reader)


def _answer_reader(stream: RowStream, model: ModelHandle, notes: list[str]) -> AnswerReader:
    """How answers are taken apart; adds a note when tools were given and the model's way of calling them is not known."""
    columns, tokenizer = stream.result_columns, model.tokenizer
    if not columns.tool_calls and not columns.reasoning:
        return AnswerReader(tokenizer.vocabulary)
    known = tokenizer.tool_format if columns.tool_calls else None
    if columns.tool_calls and known is None and stream.shape == "plain":
        notes.append("tool calls: this model's way of writing them is not known; they stay in the text")
    marks = known.marks if known is not None else ()
    tags = [tag for pair in REASONING_TAGS for tag in pair] if columns.reasoning else []
    return AnswerReader(tokenizer.vocabulary, known, columns.reasoning, tokenizer.special_ids_of([*marks, *tags]))


def _cells_of(files: InputFiles) -> Cells:
    if files.is_table:
        return Cells.TABLE
    return Cells.TEXT if files.kind == "csv" else Cells.JSON


def _treatment(stream: RowStream, columns: Columns, chat: bool, has_template: bool) -> str:
    """How the columns that the first rows use become what the model reads."""
    if columns.template:
        after = "each text becomes one user message (--no-chat sends it raw)" if chat else "sent raw"
        return f"prompts: --prompt-template over {', '.join(columns.template)}; {after}"
    raw = "sent raw" + (" (--chat wraps it)" if has_template else "")
    ways = {
        columns.prompt: "each becomes one user message (--no-chat sends it raw)" if chat else raw,
        columns.messages: "rendered through the chat template",
        columns.token_ids: "used as they are",
    }
    used = {name for row in stream.window if row.values is not None for name in ways if name and row.values.get(name) is not None}
    return "prompts: " + "; ".join(f"{name!r}, {way}" for name, way in ways.items() if name in used) if used else "prompts: none so far"


def note_on_models(stream: RowStream, model: str) -> list[str]:
    """A line for people when OpenAI lines name another model than the one at work."""
    others = other_models(stream.window, model) if stream.shape == "openai" else []
    return [f"the lines ask for {', '.join(others[:3])}; all are run with {model}"] if others else []
