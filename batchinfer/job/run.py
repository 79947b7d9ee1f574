"""The run job, from first row to finished output."""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from signal import SIGPIPE, Signals
from time import perf_counter
from typing import TYPE_CHECKING, Any

from batchinfer.config import EngineConfig
from batchinfer.errors import ConfigError, InputFileError, OutputConflict
from batchinfer.io.durable import write_whole
from batchinfer.io.finish import finish
from batchinfer.io.join import Join, KeptColumns
from batchinfer.io.lock import OutputLock
from batchinfer.io.manifest import try_read_json
from batchinfer.io.openai_out import errors_path
from batchinfer.io.options import InputOptions, OutputOptions
from batchinfer.io.partial import PartialFile
from batchinfer.io.places import Places, find_places, is_streamed
from batchinfer.io.rebuild import rebuild_openai_partial, rebuild_partial
from batchinfer.io.results import ResultColumns
from batchinfer.io.source import InputFiles, find_files, identity_of, open_source
from batchinfer.io.spool import spool
from batchinfer.job.generate import Asked, Generation, Outside, Store
from batchinfer.job.progress import Tally
from batchinfer.job.records import JobObserver, JobParts, JobReport, NullObserver
from batchinfer.job.rows_in import JobRows, RowStream, note_on_models, open_rows
from batchinfer.job.signals import Interrupted, interruptible
from batchinfer.job.stream_out import OrderedStream, ReaderGone
from batchinfer.job.workplace import (
    AskedModel,
    JobIdentity,
    State,
    begin_manifest,
    check_space,
    find_state,
    free_settings,
    frozen_date,
    identity_of_job,
    layout_of,
)
from batchinfer.machine import peak_rss_mb, process_age_s, read_versions

if TYPE_CHECKING:
    from batchinfer.build import ModelHandle


@dataclass(frozen=True, slots=True)
class Opened:
    """An input that was looked into, and the place for its results."""

    files: InputFiles
    identity: list[list[object]]
    places: Places
    stream: RowStream
    kept: KeptColumns


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
    """One run. The order of `run` is the order of the day."""

    def __init__(self, asked: Asked, observer: JobObserver, parts: JobParts) -> None:
        self.asked = asked
        self.report = JobReport(input=asked.input.input, output=asked.output.output or "", model=asked.config.model)
        self.report.seconds.start = process_age_s()
        self._outside = Outside(observer, parts, self.report)
        self._streams = is_streamed(asked.output.output)
        self._tally = Tally()
        self._places: Places | None = None
        self._store: Store | None = None
        self._rows: JobRows | None = None
        self._generation: Generation | None = None

    def run(self, stack: ExitStack) -> None:
        """Open, look, check, load, generate, finish."""
        opened = self._open(stack)
        date = frozen_date(opened.places, self.asked.output)
        model = self._open_model(opened.stream, date)
        identity = self._identity(opened, model)
        if not self._streams and not self._claim(opened, identity, date):
            return
        partial = PartialFile(opened.places.partial)
        store = self._store = Store(partial, self._tally)
        self._say_found(partial)
        stream = opened.stream
        is_openai = stream.shape == "openai"
        source = open_source(opened.files)
        join = Join(source, partial, stream.start, stream.stop, stream.result_columns, opened.kept, is_openai, self.asked.config.model)
        if self._streams:
            store.out = OrderedStream(join, self.asked.output.output or "-")
        if model is None:
            self.report.message = f"{self.asked.input.input}: 0 rows found"
        else:
            assert self._rows is not None
            self._generation = Generation(self.asked, self._outside, self._rows, store)
            self._generation.run(model)
        if opened.files.kind == "parquet" and identity_of(opened.files.paths) != opened.identity:  # lines are compared one by one
            raise InputFileError(f"{self.asked.input.input} changed while the job ran; start again with --overwrite")
        self._finish(join, opened.places)
        if not self._streams:
            self._settle(opened.places, identity, date)

    def _open(self, stack: ExitStack) -> Opened:
        """The input, looked into; a place for results that nobody else uses; and what identifies the input."""
        options, output = self.asked.input, self.asked.output
        given = None if output.output is None or self._streams else Path(output.output)
        files = find_files(options.input, given)
        if self._streams:
            places = Places(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batchinfer-"))) / "stream.jsonl")
        else:
            places = find_places(output.output, files)
            self.report.output = str(places.output)
            stack.enter_context(OutputLock(places.lock, places.output))
        self._places = places
        if files.streamed:
            spooled = spool(files, places.spool)
            files, identity = spooled.files, spooled.identity
        else:
            identity = identity_of(files.paths)
        stream = RowStream.open(files, options, ResultColumns(output.prefix, output.generated_token_ids))
        if stream.shape == "openai":
            _check_openai(output, places)
        kept = _kept_columns(output, stream)
        for name in _unseen(output, stream):
            self._outside.observer.note(f"no column {name!r} in the first {len(stream.window):,} rows (--keep-columns, --drop-columns)")
        return Opened(files, identity, places, stream, kept)

    def _open_model(self, stream: RowStream, date: datetime) -> ModelHandle | None:
        """The model without its weights, None when there is no row for it."""
        if not stream.window:
            return None
        observer, parts, _ = self._outside.observer, self._outside.parts, self.report
        observer.note(f"model: {self.asked.config.model}")
        began = perf_counter()
        model = parts.open_model(self.asked.config)
        self._rows = open_rows(stream, model, self.asked.sampling, date)
        self.report.seconds.load += perf_counter() - began
        for text in [*self._rows.notes, *note_on_models(stream, self.asked.config.model)]:
            observer.note(text)
        return model

    def _identity(self, opened: Opened, model: ModelHandle | None) -> JobIdentity:
        asked, asked_model = self.asked, None
        if model is not None:
            assert self._rows is not None
            fingerprint = self._outside.parts.model_fingerprint(model)
            asked_model = AskedModel(fingerprint, model.max_model_len, self._rows.chat, self._rows.defaults)
        record = identity_of_job(asked.config, asked.input, asked.output, opened.identity, asked_model)
        self.report.fingerprint = record
        return JobIdentity(record, layout_of(asked.output), free_settings(asked.config), read_versions())

    def _claim(self, opened: Opened, identity: JobIdentity, date: datetime) -> bool:
        """Make the place this job's; False when an earlier run has done everything."""
        places, files, output, options = opened.places, opened.files, self.asked.output, self.asked.input
        is_openai = opened.stream.shape == "openai"
        state = find_state(places, identity, output, self._outside.observer.note)
        if state is State.COMPLETE and not self._has_failed_rows(places):
            return False
        if state is State.FRESH and is_openai and errors_path(places.output).exists() and not output.overwrite:
            raise OutputConflict(f"{errors_path(places.output)} exists already and is not this job's; give another -o, or --overwrite")
        whole = options.limit is None and not options.offset and opened.kept.all
        if whole and not is_openai and not places.is_parquet and files.kind != "parquet":  # the output holds all of the input
            check_space(places.output.parent, sum(path.stat().st_size for path in files.paths), "the output")
        begin_manifest(places, state, identity, date)
        if state is State.COMPLETE:
            columns = opened.stream.result_columns
            rows = RowStream.open(files, options, columns).rows()
            if is_openai:
                rebuild_openai_partial(rows, places.output, places.partial)
            else:
                rebuild_partial(rows, places.output, columns, places.partial)
        return True

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
        found, note = partial.found, self._outside.observer.note
        if found.torn_bytes:
            note(f"{partial.path}: cut off a torn last line of {found.torn_bytes:,} bytes; its row runs again")
        if found.damaged_lines:
            note(f"{partial.path}: {found.damaged_lines:,} damaged lines; their rows run again")
        if found.rows:
            note(f"going on: {found.rows:,} rows are done already")

    def _finish(self, join: Join, places: Places) -> None:
        """All results are there: put them behind their rows."""
        began = perf_counter()
        assert self._store is not None
        if self._store.out is not None:
            self._store.out.emit_ready()
            self._store.out.close()
        else:
            self._store.partial.sync()
            if not places.is_parquet:
                check_space(places.output.parent, self._store.partial.size, "the output")
            self._outside.observer.note(f"writing {places.output}")
            finish(join, places.output)
        self.report.seconds.finish = perf_counter() - began
        self._total()
        if join.openai and self.report.rows_failed and not self._streams:
            self.report.message = f"failed lines: {errors_path(places.output)}"

    def _settle(self, places: Places, identity: JobIdentity, date: datetime) -> None:
        """Leave the report, and only the report, beside the output."""
        record = {
            **self._outside.parts.report_json(self.report),
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
        self._tally.fill(report)
        engine = self._generation.engine if self._generation is not None else None
        if engine is not None:
            stats = report.stats = engine.stats
            spent = stats.seconds
            seconds.schedule, seconds.prefill, seconds.decode = spent.schedule, spent.prefill, spent.decode
            seconds.sample, seconds.retire = spent.sample, spent.retire
        seconds.io = seconds.finish
        seconds.io += self._store.seconds if self._store is not None else 0.0
        seconds.io += self._rows.seconds + self._rows.stream.seconds if self._rows is not None else 0.0
        seconds.wall = process_age_s()
        report.peak_rss_mb = peak_rss_mb()

    def stopped(self, signum: int) -> None:
        """A signal ended the job: drop what is unfinished, keep the rest."""
        self.report.interrupted = signum
        if self._generation is not None and self._generation.engine is not None:
            self._generation.engine.abort()
        if self._store is not None and not self._streams:
            self._store.partial.sync()
        self._total()
        if signum == SIGPIPE:
            return
        name, kept = Signals(signum).name, self._tally.rows_done
        if self._streams:
            self.report.message = f"stopped by {name} after {kept:,} rows; a streamed output cannot be resumed"
        else:
            self.report.message = f"stopped by {name}: {kept:,} finished rows are kept; run the same command again to go on"

    def close(self) -> None:
        """Close what is open. Files that are needed for going on stay; where nothing was finished, nothing does."""
        if self._store is not None:
            self._store.partial.close()
        places = self._places
        if places is not None and not (places.partial.exists() and places.partial.stat().st_size):
            for path in (places.partial, places.manifest, places.spool):
                path.unlink(missing_ok=True)


def _check_openai(output: OutputOptions, places: Places) -> None:
    """OpenAI's response lines have a form of their own: what would change it is refused."""
    if places.is_parquet:
        raise ConfigError(f"-o {places.output}: answers to OpenAI batch lines are JSONL; give a name ending in .jsonl")
    for flag, given in {
        "--keep-columns": output.keep_columns is not None,
        "--drop-columns": bool(output.drop_columns),
        "--output-prefix": bool(output.prefix),
        "generated_token_ids": output.generated_token_ids,
    }.items():
        if given:
            raise ConfigError(f"{flag} is for plain rows; answers to OpenAI batch lines have a fixed form")


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


def _unseen(output: OutputOptions, stream: RowStream) -> list[str]:
    """Columns named on the command line that no row so far has: a typing mistake, or a rare column."""
    named = [*(output.keep_columns or ()), *output.drop_columns]
    if stream.files.kind == "parquet" or not stream.window:
        return []
    return [name for name in named if not any(row.values is not None and name in row.values for row in stream.window)]
