"""The run job, from first row to finished output."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from signal import SIGPIPE, Signals
from time import perf_counter
from typing import TYPE_CHECKING, Any

from batchinfer.config import EngineConfig
from batchinfer.core.request import Request, Result
from batchinfer.errors import BatchInferError, ConfigError, InputFileError
from batchinfer.io.durable import write_whole
from batchinfer.io.finish import finish
from batchinfer.io.join import Join, KeptColumns
from batchinfer.io.lock import OutputLock
from batchinfer.io.manifest import try_read_json
from batchinfer.io.options import InputOptions, OutputOptions
from batchinfer.io.partial import PartialFile
from batchinfer.io.places import Places, find_places, is_streamed
from batchinfer.io.rebuild import rebuild_partial
from batchinfer.io.record import InputRow
from batchinfer.io.results import ResultColumns
from batchinfer.io.source import InputFiles, find_files, identity_of, open_source
from batchinfer.io.spool import spool
from batchinfer.job.progress import Progress, Tally
from batchinfer.job.records import JobInfo, JobObserver, JobParts, JobReport, NullObserver
from batchinfer.job.rows_in import WINDOW_ROWS, JobRows, RowStream, open_rows
from batchinfer.job.signals import Interrupted, interruptible
from batchinfer.job.stream_out import OrderedStream, ReaderGone
from batchinfer.job.workplace import (
    AskedModel,
    JobIdentity,
    State,
    begin_manifest,
    check_space,
    find_state,
    frozen_date,
    identity_of_job,
    layout_of,
)
from batchinfer.machine import peak_rss_mb, process_age_s, read_versions

if TYPE_CHECKING:
    from batchinfer.build import JobNeed, ModelHandle
    from batchinfer.core.stats import StepShape
    from batchinfer.engine import Engine

DEFAULT_NUM_SEQS = 256


class StrictError(BatchInferError):
    """A row failed and `--strict` was given."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The job as it was asked for."""

    config: EngineConfig
    input: InputOptions
    output: OutputOptions
    sampling: dict[str, Any]


def run_job(
    engine_config: EngineConfig,
    input_options: InputOptions,
    output_options: OutputOptions,
    sampling: dict[str, Any] | None = None,
    observer: JobObserver | None = None,
    parts: JobParts | None = None,
) -> JobReport:
    """Run the whole job: read, generate, write. Raises `BatchInferError` when it cannot be done.

    `sampling` are the job's own parameters (command line over settings file). A job that a signal ended returns a
    report that says so.
    """
    asked = Asked(engine_config, input_options, output_options, sampling or {})
    job = Job(asked, observer or NullObserver(), parts or JobParts())
    with interruptible(), ExitStack() as stack:
        try:
            job.run(stack)
        except Interrupted as stop:
            job.stopped(stop.signum)
        except ReaderGone:
            job.stopped(SIGPIPE)
        finally:
            job.close()
    return job.report


class Job:
    """One run. The order of `run` is the order of the day; everything that it needs later is set there."""

    def __init__(self, asked: Asked, observer: JobObserver, parts: JobParts) -> None:
        self.asked = asked
        self.observer = observer
        self.parts = parts
        self.report = JobReport(input=asked.input.input, output=asked.output.output or "", model=asked.config.model)
        self.report.seconds.start = process_age_s()
        self.tally = Tally()
        self.places: Places | None = None
        self.partial: PartialFile | None = None
        self.stream: RowStream | None = None
        self.rows: JobRows | None = None
        self.out: OrderedStream | None = None
        self.engine: Engine | None = None
        self.progress: Progress | None = None
        self._pending: dict[int, tuple[str, bool]] = {}  # rows on their way: digest, may be copied as they are
        self._store_seconds = 0.0

    def run(self, stack: ExitStack) -> None:
        """Open, look, check, load, generate, finish."""
        asked = self.asked
        files, places, identity_files = self._open_places(stack)
        self.places = places
        columns = ResultColumns(asked.output.prefix, asked.output.generated_token_ids)
        stream = self.stream = RowStream.open(files, asked.input, columns)
        kept = _kept_columns(asked.output, stream)
        model, date = None, frozen_date(places, asked.output)
        if stream.window:
            self.observer.note(f"model: {asked.config.model}")
            began = perf_counter()
            model = self.parts.open_model(asked.config)
            self.rows = open_rows(stream, model, asked.sampling, date)
            self.report.seconds.load += perf_counter() - began
            for text in self.rows.notes:
                self.observer.note(text)
        identity = self._identity(identity_files, model)
        self.report.fingerprint = identity.fingerprint
        state = State.FRESH if self._streams else find_state(places, identity, asked.output, self.observer.note)
        if state is State.COMPLETE and not self._has_failed_rows(places):
            return
        if not self._streams:
            if kept.all and not places.is_parquet and files.kind != "parquet" and asked.input.limit is None and not asked.input.offset:
                check_space(places.output.parent, sum(path.stat().st_size for path in files.paths), "the output")
            begin_manifest(places, state, identity, date)
            if state is State.COMPLETE:
                rows = RowStream.open(files, asked.input, columns).rows()
                rebuild_partial(rows, places.output, columns, places.partial)
        partial = self.partial = PartialFile(places.partial)
        self._say_found(partial)
        join = Join(open_source(files), partial, stream.start, stream.stop, columns, kept)
        if self._streams:
            self.out = OrderedStream(join, asked.output.output or "-")
        if model is not None:
            self._generate(model)
        else:
            self.report.message = f"{asked.input.input}: 0 rows found"
        self._finish(join, places, identity, date)

    # -- opening

    @property
    def _streams(self) -> bool:
        return is_streamed(self.asked.output.output)

    def _open_places(self, stack: ExitStack) -> tuple[InputFiles, Places, list[list[object]]]:
        """The input's files, a place for results that nobody else uses, and what identifies the input."""
        given = self.asked.output.output
        streams = self._streams
        files = find_files(self.asked.input.input, None if given is None or streams else Path(given))
        if streams:
            places = Places(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batchinfer-"))) / "stream.jsonl")
        else:
            places = find_places(given, files)
            self.report.output = str(places.output)
            stack.enter_context(OutputLock(places.lock, places.output))
        if files.streamed:
            spooled = spool(files, places.spool)
            return spooled.files, places, spooled.identity
        return files, places, identity_of(files.paths)

    def _identity(self, files: list[list[object]], model: ModelHandle | None) -> JobIdentity:
        asked_model = None
        if model is not None:
            assert self.rows is not None
            fingerprint = self.parts.model_fingerprint(model)
            asked_model = AskedModel(fingerprint, model.max_model_len, self.rows.chat, self.rows.defaults)
        asked = self.asked
        fingerprint_record = identity_of_job(asked.config, asked.input, asked.output, files, asked_model)
        return JobIdentity(fingerprint_record, layout_of(asked.output), read_versions())

    def _has_failed_rows(self, places: Places) -> bool:
        """For a finished job: whether there is anything to run again. False: the report says that it is complete."""
        saved = try_read_json(places.report) or {}
        if self.asked.output.retry_errors and saved.get("failed_positions"):
            return True
        report, rows = self.report, saved.get("rows", {})
        report.already_complete = True
        report.rows_total, report.rows_ok, report.rows_failed = (rows.get(name, 0) for name in ("total", "ok", "failed"))
        way_out = "no row failed" if self.asked.output.retry_errors else "--overwrite runs it again"
        report.message = f"{places.output} is complete and nothing has changed; {way_out}"
        return False

    def _say_found(self, partial: PartialFile) -> None:
        found = partial.found
        if found.torn_bytes:
            self.observer.note(f"{partial.path}: cut off a torn last line of {found.torn_bytes:,} bytes; its row runs again")
        if found.damaged_lines:
            self.observer.note(f"{partial.path}: {found.damaged_lines:,} damaged lines; their rows run again")
        if found.rows:
            self.observer.note(f"going on: {found.rows:,} rows are done already")

    # -- generating

    def _generate(self, model: ModelHandle) -> None:
        assert self.rows is not None
        assert self.stream is not None
        items = self.rows.prepared(self._undone(self.stream.rows()), self._note_pending)
        head = list(islice(items, WINDOW_ROWS))
        if not any(isinstance(item, Request) for item in head) and len(head) < WINDOW_ROWS:
            self._store_all(item for item in head if isinstance(item, Result))
            return
        engine = self._build(model, head)
        text = self.rows.preparer.first_text
        if text is not None:
            self.observer.prompt_shown(text)
        began = perf_counter()
        self._store_all(engine.run(chain(_drained(head), items)))
        self.report.seconds.run = perf_counter() - began

    def _undone(self, rows: Iterable[InputRow]) -> Iterator[InputRow]:
        """The rows without a result; those with one are compared with what they were, and counted."""
        assert self.partial is not None
        partial, retry = self.partial, self.asked.output.retry_errors
        if not partial.index.num_rows:
            yield from rows
            return
        for row in rows:
            stored = partial.try_get(row.position)
            if stored is None or (retry and stored.failed):
                partial.index.drop(row.position)
                yield row
                continue
            if stored.digest != row.digest():
                raise InputFileError(
                    f"{self.asked.input.input}: {row.place} is not what it was when the job began; start afresh with --overwrite"
                )
            fields = stored.fields()
            self.tally.add_stored(row.position, fields["finish_reason"], fields["error"])
            self.report.rows_done_before += 1

    def _note_pending(self, row: InputRow) -> None:
        self._pending[row.position] = (row.digest(), row.plain)

    def _build(self, model: ModelHandle, head: list[Request | Result]) -> Engine:
        began = perf_counter()
        engine = self.engine = self.parts.build_engine(self.asked.config, model, self._need(model, head))
        self.report.seconds.load += perf_counter() - began
        self.report.choices = list(engine.choices)
        self.report.settings = dict(engine.settings)
        assert self.stream is not None
        self.progress = Progress(self.tally, self.stream, engine.stats)
        engine.on_step = self._on_step
        self.observer.started(self._info(engine))
        return engine

    def _need(self, model: ModelHandle, head: list[Request | Result]) -> JobNeed:
        from batchinfer.build import JobNeed

        limit = model.max_model_len
        sizes = sorted(
            (min(len(item.prompt_ids) + item.params.max_tokens, limit) for item in head if isinstance(item, Request)), reverse=True
        )
        return JobNeed(sum(sizes[: self.asked.config.max_num_seqs or DEFAULT_NUM_SEQS]))

    def _info(self, engine: Engine) -> JobInfo:
        assert self.rows is not None
        assert self.stream is not None
        assert self.partial is not None
        options = self.asked.input
        return JobInfo(
            model=self.asked.config.model,
            input=options.input,
            output=self.report.output,
            shape=self.stream.shape,
            num_rows=self.stream.num_rows,
            rows_done_before=self.partial.found.rows,
            chat=self.rows.chat,
            prompt_column=options.prompt_column,
            messages_column=options.messages_column,
            parameter_columns=self.rows.parameter_columns,
            defaults=self.rows.defaults,
            choices=tuple(engine.choices),
            max_num_seqs=engine.limits.max_num_seqs,
            max_model_len=engine.limits.max_model_len,
            pool_tokens=engine.limits.pool_tokens,
        )

    def _on_step(self, shape: StepShape) -> None:
        assert self.partial is not None
        assert self.progress is not None
        self.observer.step(shape)
        self.partial.sync_if_due()
        if self.progress.due():
            self.observer.tick(self.progress.snapshot())

    def _store_all(self, results: Iterable[Result]) -> None:
        assert self.partial is not None
        assert self.rows is not None
        columns = self.rows.stream.result_columns
        shown = False
        for result in results:
            began = perf_counter()
            digest, plain = self._pending.pop(result.row)
            self.partial.append(result.row, digest, plain, columns.fragment(result))
            self.tally.add(result)
            if self.out is not None:
                self.out.emit_ready()
            self._store_seconds += perf_counter() - began
            if result.error is None:
                if not shown:
                    shown = True
                    self.observer.answer_shown(result.row, result.text)
            elif self.asked.input.strict:
                raise StrictError(f"--strict: row {result.row:,} failed: {result.error.message} ({result.error.code})")
        if self.progress is not None:
            self.observer.tick(self.progress.snapshot())

    # -- ending

    def _finish(self, join: Join, places: Places, identity: JobIdentity, date: datetime) -> None:
        began = perf_counter()
        assert self.partial is not None
        if self.out is not None:
            self.out.emit_ready()
            self.out.close()
        else:
            self.partial.sync()
            if places.output.suffix != ".parquet":
                check_space(places.output.parent, self.partial.size, "the output")
            finish(join, places.output)
        self.report.seconds.finish = perf_counter() - began
        self._total()
        if self.out is not None:
            return
        record = {
            **self.parts.report_json(self.report),
            "fingerprint": identity.fingerprint,
            "layout": identity.layout,
            "date": date.isoformat(),
            "failed_positions": self.report.failed_positions,
        }
        write_whole(places.report, json.dumps(record, indent=1, default=str).encode("utf-8", "backslashreplace"))
        for path in (places.partial, places.manifest, places.spool):  # in this order: a manifest alone means nothing
            path.unlink(missing_ok=True)

    def _total(self) -> None:
        report, seconds = self.report, self.report.seconds
        self.tally.fill(report)
        if self.engine is not None:
            stats = report.stats = self.engine.stats
            spent = stats.seconds
            seconds.schedule, seconds.prefill, seconds.decode = spent.schedule, spent.prefill, spent.decode
            seconds.sample, seconds.retire = spent.sample, spent.retire
        seconds.io = self._store_seconds + seconds.finish
        seconds.io += self.stream.seconds if self.stream is not None else 0.0
        seconds.io += self.rows.seconds if self.rows is not None else 0.0
        seconds.wall = process_age_s()
        report.peak_rss_mb = peak_rss_mb()

    def stopped(self, signum: int) -> None:
        """A signal ended the job: drop what is unfinished, keep the rest."""
        self.report.interrupted = signum
        if self.engine is not None:
            self.engine.abort()
        if self.partial is not None and self.out is None:
            self.partial.sync()
        self._total()
        if signum == SIGPIPE:
            return
        name = Signals(signum).name
        kept = self.tally.rows_done
        if self.out is None:
            self.report.message = f"stopped by {name}: {kept:,} finished rows are kept; run the same command again to go on"
        else:
            self.report.message = f"stopped by {name} after {kept:,} rows; a streamed output cannot be resumed"

    def close(self) -> None:
        """Close what is open. Files that are needed for going on stay; where nothing was finished, nothing does."""
        if self.partial is not None:
            self.partial.close()
        if self.places is not None and not (self.places.partial.exists() and self.places.partial.stat().st_size):
            for path in (self.places.partial, self.places.manifest, self.places.spool):
                path.unlink(missing_ok=True)


def _drained(items: list[Request | Result]) -> Iterator[Request | Result]:
    items.reverse()
    while items:
        yield items.pop()


def _kept_columns(output: OutputOptions, stream: RowStream) -> KeptColumns:
    keep = None if output.keep_columns is None else frozenset(output.keep_columns)
    named = [*(output.keep_columns or ()), *output.drop_columns]
    if named and stream.files.kind == "parquet":
        from batchinfer.io.parquet_source import ParquetSource

        assert isinstance(stream.source, ParquetSource)
        unknown = [name for name in named if name not in stream.source.column_types]
        if unknown:
            raise ConfigError(f"no column {unknown[0]!r} in {stream.options.input}; columns: {', '.join(stream.source.column_types)}")
    return KeptColumns(keep, frozenset(output.drop_columns))
