"""The middle of a job: rows through the engine, each result stored the moment it is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from batchinfer.config import EngineConfig
from batchinfer.core.request import FinishReason, Request, Result
from batchinfer.errors import BatchInferError, InputFileError
from batchinfer.io.logprob_text import asked_members
from batchinfer.io.options import InputOptions, OutputOptions
from batchinfer.io.partial import PartialFile, PartialRow
from batchinfer.io.record import InputRow
from batchinfer.io.results import NUM_GENERATED, NUM_INPUT
from batchinfer.io.truncate import SKIPPED
from batchinfer.job.arithmetic import keep_arithmetic
from batchinfer.job.progress import Progress, Tally
from batchinfer.job.records import JobInfo, JobObserver, JobParts, JobReport
from batchinfer.job.row_times import NoRowTimes, RowClock, RowTimes
from batchinfer.job.rows_in import WINDOW_ROWS, JobRows, RowStream
from batchinfer.job.stream_out import OrderedStream, UnorderedStream
from batchinfer.job.watchdog import Watchdog

if TYPE_CHECKING:
    from batchinfer.build import JobNeed, ModelHandle
    from batchinfer.core.stats import StepShape
    from batchinfer.core.vocabulary import Vocabulary
    from batchinfer.engine import Engine


READING = "read, render, tokenise"


class StrictError(BatchInferError):
    """A row failed and `--strict` was given."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The job as it was asked for."""

    config: EngineConfig
    input: InputOptions
    output: OutputOptions
    sampling: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outside:
    """Who watches the job, what it is handed, and the report that it fills."""

    observer: JobObserver
    parts: JobParts
    report: JobReport


@dataclass(slots=True)
class Store:
    """Where results go: the partial file, the count, and for a streamed output the reader."""

    partial: PartialFile
    tally: Tally
    out: OrderedStream | UnorderedStream | None = None
    manifest: Path | None = None  # None: a streamed output has none
    seconds: float = 0.0
    pending: dict[int, tuple[str, bool, str, InputRow | None]] = field(default_factory=dict)  # on their way: digest, `plain`, place, row

    def expect(self, row: InputRow) -> None:
        """Remember what must be stored beside the row's result."""
        self.pending[row.position] = (row.digest(), row.plain, row.place, row if isinstance(self.out, UnorderedStream) else None)

    def placed(self, row: int, message: str) -> str:
        """The message with the row's place before it, where that does not stand there already."""
        place = self.pending[row][2]
        return message if message.startswith(place) else f"{place}: {message}"

    def put(self, result: Result, fragment: str) -> None:
        """Store a result; it is safe from the end of this call on."""
        began = perf_counter()
        digest, plain, _, row = self.pending.pop(result.row)
        if isinstance(self.out, UnorderedStream):
            assert row is not None
            self.out.emit(row, PartialRow(result.row, digest, plain, fragment.encode("utf-8", "backslashreplace")))
        else:
            self.partial.append(result.row, digest, plain, fragment)
        self.tally.add(result)
        if isinstance(self.out, OrderedStream):
            self.out.emit_ready()
        self.seconds += perf_counter() - began


class Generation:
    """Runs a job's rows."""

    def __init__(self, asked: Asked, outside: Outside, rows: JobRows, store: Store, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._asked = asked
        self._outside = outside
        self._rows = rows
        self._stream: RowStream = rows.stream
        self._store = store
        self._progress: Progress | None = None
        self._times: RowClock = RowTimes() if asked.output.metrics else NoRowTimes()
        self._watch = outside.parts.watch
        self._max_model_len = 0
        self.engine: Engine | None = None

    def run(self, model: ModelHandle) -> None:
        """Give every row without a result one. The engine is built only if there is a row for it."""
        self._max_model_len = model.max_model_len
        items = iter(self._watch.each(READING, self._rows.prepared(self._undone(self._stream.rows()), self._expect)))
        head = list(islice(items, WINDOW_ROWS))
        if not any(isinstance(item, Request) for item in head) and len(head) < WINDOW_ROWS:
            self._store_all((item for item in head if isinstance(item, Result)), model.tokenizer.vocabulary)
            return
        engine = self._build(model, head)
        text = self._rows.preparer.first_text
        if text is not None:
            self._outside.observer.prompt_shown(text)
        began = perf_counter()
        try:
            results = engine.run(self._times.given(chain(_drained(head), items)))
            self._store_all(self._watch.each("engine", results), model.tokenizer.vocabulary)
        finally:  # an interrupted run is reported too
            self._outside.report.seconds.run = perf_counter() - began
        self._watchdog.working(False)

    def _expect(self, row: InputRow) -> None:
        self._watchdog.beat()
        self._store.expect(row)

    def _undone(self, rows: Iterable[InputRow]) -> Iterator[InputRow]:
        """The rows without a result; those with one are compared with what they were, and counted."""
        partial = self._store.partial
        if not partial.index.num_rows:
            yield from rows
            return
        for row in rows:
            stored = partial.try_get(row.position)
            fields = None if stored is None else stored.fields()
            if stored is None or fields is None or self._runs_again(row, fields):
                partial.index.drop(row.position)
                yield row
                continue
            if stored.digest != row.digest():
                raise InputFileError(
                    f"{self._asked.input.input}: {row.place} is not what it was when the job began; start afresh with --overwrite"
                )
            self._store.tally.add_stored(row.position, fields["finish_reason"], fields["error"])
            self._outside.report.rows_done_before += 1

    def _runs_again(self, row: InputRow, fields: dict[str, Any]) -> bool:
        """Whether a row that is done was to be repeated: it failed, or `max_tokens` cut it and it gets more now."""
        output = self._asked.output
        if fields["error"] is not None:
            return output.retry_errors
        if output.retry_truncated is None or fields["finish_reason"] != FinishReason.LENGTH.value:
            return False
        if fields[NUM_GENERATED] >= output.retry_truncated or fields[NUM_INPUT] + fields[NUM_GENERATED] >= self._max_model_len:
            return False
        row.min_max_tokens = output.retry_truncated
        return True

    def _build(self, model: ModelHandle, head: list[Request | Result]) -> Engine:
        report = self._outside.report
        began = perf_counter()
        engine = self.engine = self._outside.parts.build_engine(self._asked.config, model, self._need(model, head))
        report.seconds.load += perf_counter() - began
        if self._store.manifest is not None:
            keep_arithmetic(self._store.manifest, engine, self._store.partial.found.rows, self._outside.observer)
        report.choices = list(engine.choices)
        report.settings = dict(engine.settings)
        self._progress = Progress(self._store.tally, self._stream, engine.stats)
        engine.on_step = self._on_step
        engine.on_notice = self._outside.observer.warn
        self._outside.observer.started(self._info(engine))
        return engine

    def _need(self, model: ModelHandle, head: list[Request | Result]) -> JobNeed:
        """What the rows seen so far can use at once."""
        from batchinfer.build import JobNeed

        rows = [item for item in head if isinstance(item, Request)]
        lengths = (len(row.prompt_ids) + row.params.max_tokens for row in rows for _ in range(row.params.n))
        return JobNeed.of(self._asked.config, model, lengths)

    def _info(self, engine: Engine) -> JobInfo:
        options = self._asked.input
        return JobInfo(
            model=self._asked.config.model,
            input=options.input,
            output=self._outside.report.output,
            shape=self._stream.shape,
            num_rows=self._stream.num_rows,
            rows_done_before=self._store.partial.found.rows,
            treatment=self._rows.treatment,
            parameter_columns=self._rows.parameter_columns,
            defaults=self._rows.defaults,
            choices=tuple(engine.choices),
            max_num_seqs=engine.limits.max_num_seqs,
            max_model_len=engine.limits.max_model_len,
            pool_tokens=engine.limits.pool_tokens,
        )

    def _on_step(self, shape: StepShape) -> None:
        assert self._progress is not None
        self._watchdog.beat()
        self._times.step(shape)
        self._watch.stepped()
        self._outside.observer.step(shape)
        if self._progress.due():
            self._outside.observer.tick(self._progress.snapshot())

    def _store_all(self, results: Iterable[Result], vocabulary: Vocabulary) -> None:
        columns, store, observer = self._stream.result_columns, self._store, self._outside.observer
        shown = False
        self._watchdog.working(True)
        for result in results:
            self._watchdog.working(False)  # a reader of ours may take as long as it likes
            if (
                result.error is not None and result.error.code != SKIPPED and self._asked.input.strict
            ):  # not stored: it must fail again when the job is repeated
                raise StrictError(f"--strict: {store.placed(result.row, result.error.message)} ({result.error.code})")
            with self._watch.stage("take answers apart, store"):
                answers = self._rows.answers_of(result)
                store.tally.rows_truncated += self._rows.preparer.was_cut(result.row) and result.error is None
                fragment = columns.fragment(result, answers[0] if answers else None, self._times.metrics(result))
                store.put(result, fragment + asked_members(result, answers, vocabulary))
            if result.error is None and not shown:
                shown = True
                observer.answer_shown(result.row, result.text)
            self._watchdog.working(True)
        if self._progress is not None:
            observer.tick(self._progress.snapshot())


def _drained(items: list[Request | Result]) -> Iterator[Request | Result]:
    items.reverse()
    while items:
        yield items.pop()
