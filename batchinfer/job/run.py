"""The run job, from first row to finished output."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from signal import SIGPIPE, Signals
from time import perf_counter
from typing import TYPE_CHECKING, Any

from batchinfer.build_structures import check_job_structure, grammar_shelf
from batchinfer.config import EngineConfig
from batchinfer.errors import ConfigError, InputFileError, OutputConflict
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
from batchinfer.io.source import InputFiles, identity_of, open_source
from batchinfer.io.spool import spool
from batchinfer.job.checks import check_kept, check_openai, no_rows, say_found, unseen
from batchinfer.job.generate import Asked, Generation, Outside, Store
from batchinfer.job.progress import Tally
from batchinfer.job.records import JobObserver, JobParts, JobReport, NullObserver
from batchinfer.job.rows_in import JobRows, RowStream, find_input, note_on_models, open_rows
from batchinfer.job.signals import Interrupted, interruptible
from batchinfer.job.stream_out import OrderedStream, Outlet, ReaderGone, UnorderedStream, check_stream
from batchinfer.job.watchdog import Watchdog, briefly, say_last
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
    settle,
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
    with job.watchdog, interruptible(job.told):
        try:
            job.run_guarded()
        except Interrupted as stop:  # while closing
            job.report.interrupted = stop.signum
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
        self._scratch: Path | None = None
        self.watchdog = Watchdog(self.told, self.hung, parts.hang_s)

    def run_guarded(self) -> None:
        """Run, and turn a signal or a reader that goes away into an orderly end."""
        with ExitStack() as stack:
            try:
                self.run(stack)
            except BaseException as error:
                signum = _ended_by(error)
                if signum is None:
                    raise
                self.stopped(signum)
            finally:
                self.close()

    def run(self, stack: ExitStack) -> None:
        """Open, look, check, load, generate, finish."""
        watch = self._outside.parts.watch
        with watch.stage("look into the input"):
            opened = self._open(stack)
        date = frozen_date(opened.places, self.asked.output)
        model = self._open_model(opened.stream, date)
        with watch.stage("identify the job"):
            identity = self._identity(opened, model)
            if not self._streams and not self._claim(opened, identity, date):
                return
        partial = PartialFile(opened.places.partial)
        store = self._store = Store(partial, self._tally, manifest=None if self._streams else opened.places.manifest)
        self.watchdog.regularly = partial.sync_if_due
        say_found(partial, self._outside.observer.note)
        stream = opened.stream
        is_openai, name, columns = stream.shape == "openai", self.asked.config.model, stream.result_columns
        join = Join(
            open_source(opened.files), partial, stream.start, stream.stop, columns, opened.kept, is_openai, name, typed=stream.chosen
        )
        outlet = Outlet(self.asked.output.output or "-") if self._streams else None
        if outlet is not None:
            store.out = UnorderedStream(join, outlet) if self.asked.output.unordered else OrderedStream(join, outlet)
        if model is None:
            self.report.message = no_rows(stream)
        else:
            assert self._rows is not None
            self._generation = Generation(self.asked, self._outside, self._rows, store, self.watchdog)
            self._generation.run(model)
        if opened.files.is_table and identity_of(opened.files.files) != opened.identity:  # lines are compared one by one
            raise InputFileError(f"{self.asked.input.input} changed while the job ran; start again with --overwrite")
        with watch.stage("join and write the output"):
            self._finish(join, opened.places, outlet)
        if not self._streams:
            settle(opened.places, identity, date, _record_of(self._outside))

    def _open(self, stack: ExitStack) -> Opened:
        """The input, looked into; a place for results that nobody else uses; and what identifies the input."""
        options, output = self.asked.input, self.asked.output
        files = find_input(options, None if self._streams else output.output)
        if self._streams:
            check_stream(output.output or "-")
            self._scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batchinfer-")))
            places = Places(self._scratch / "stream.jsonl")
        elif output.unordered:
            raise ConfigError("--unordered is for outputs that are written as they come, such as -o -; a file is in input order")
        else:
            places = find_places(output.output, files, options.shard)
            self.report.output = places.shown
            stack.enter_context(OutputLock(places.lock, places.shown))
            stack.callback(places.delivery.forget)
        self._places = places
        if files.streamed:
            spooled = spool(files, places.spool)
            files, identity = spooled.files, spooled.identity
        else:
            identity = identity_of(files.files)
        kept = KeptColumns(None if output.keep_columns is None else frozenset(output.keep_columns), frozenset(output.drop_columns))
        columns = ResultColumns(output.prefix, output.generated_token_ids, reasoning=output.reasoning_split, metrics=output.metrics)
        stream = RowStream.open(files, options, columns, kept if output.unordered else None)
        if stream.shape == "openai":
            check_openai(output, places)
        check_kept(output, stream)
        for text in unseen(output, stream):
            self._outside.observer.warn(text)
        return Opened(files, identity, places, stream, kept)

    def _open_model(self, stream: RowStream, date: datetime) -> ModelHandle | None:
        """The model without its weights, None when there is no row for it."""
        if not stream.window:
            return None
        observer, parts, _ = self._outside.observer, self._outside.parts, self.report
        observer.note(f"model: {self.asked.config.model}")
        began = perf_counter()
        model = parts.open_model(self.asked.config)
        with parts.watch.stage("settle how rows are asked"):
            self._rows = open_rows(stream, model, self.asked.sampling, date)
        check_job_structure(self._rows.defaults, grammar_shelf(model))
        self.report.seconds.load += perf_counter() - began
        for text in self._rows.notes:
            observer.note(text)
        for text in note_on_models(stream, self.asked.config.model):
            observer.warn(text)
        return model

    def _identity(self, opened: Opened, model: ModelHandle | None) -> JobIdentity:
        asked, asked_model = self.asked, None
        if model is not None:
            assert self._rows is not None
            fingerprint = self._outside.parts.model_fingerprint(model)
            asked_model = AskedModel(fingerprint, model.max_model_len, self._rows.chat, self._rows.defaults)
        record = identity_of_job(asked.config, asked.input, asked.output, opened.identity, asked_model)
        self.report.fingerprint = record
        return JobIdentity(record, layout_of(asked.output), free_settings(asked.config), read_versions(), opened.files.files)

    def _claim(self, opened: Opened, identity: JobIdentity, date: datetime) -> bool:
        """Make the place this job's; False when an earlier run has done everything."""
        places, files, output, options = opened.places, opened.files, self.asked.output, self.asked.input
        is_openai = opened.stream.shape == "openai"
        state = find_state(places, identity, output, self._outside.observer)
        if state is State.COMPLETE and not self._has_rows_to_repeat(places):
            return False
        if state is State.FRESH and is_openai and places.delivery.has(errors_path(places.output)) and not output.overwrite:
            raise OutputConflict(
                f"{places.delivery.address(errors_path(places.output))} exists already and is not this job's; give another -o, or --overwrite"
            )
        whole = options.limit is None and not options.offset and options.shard is None and opened.kept.all
        if whole and not is_openai and not places.is_parquet and not files.is_table:  # the output holds all of the input
            check_space(places.output.parent, sum(file.size for file in files.files), "the output")
        begin_manifest(places, state, identity, date)
        if state is State.COMPLETE:
            columns = opened.stream.result_columns
            rows = RowStream.open(files, options, columns).rows()
            places.delivery.fetch(places.output)
            if is_openai:
                rebuild_openai_partial(rows, places.output, places.partial)
            else:
                rebuild_partial(rows, places.output, columns, places.partial)
        return True

    def _has_rows_to_repeat(self, places: Places) -> bool:
        """For a finished job: whether there is anything to run again. False: the report says that it is complete."""
        saved = try_read_json(places.report) or {}
        output = self.asked.output
        if output.retry_errors and saved.get("failed_positions"):
            return True
        if output.retry_truncated is not None and saved.get("finish_reasons", {}).get("length"):
            return True
        report, rows = self.report, saved.get("rows", {})
        report.already_complete = True
        report.rows_total, report.rows_ok, report.rows_failed = (rows.get(name, 0) for name in ("total", "ok", "failed"))
        repeats = output.retry_errors or output.retry_truncated is not None
        way_out = "there is no row to run again" if repeats else "--overwrite runs it again"
        report.message = f"{places.shown} is complete and nothing has changed; {way_out}"
        return False

    def _finish(self, join: Join, places: Places, outlet: Outlet | None) -> None:
        """All results are there: put them behind their rows."""
        began = perf_counter()
        assert self._store is not None
        if outlet is not None:
            if isinstance(self._store.out, OrderedStream):
                self._store.out.emit_ready()
            outlet.close()
        else:
            self._store.partial.sync()
            if not places.is_parquet:
                check_space(places.output.parent, self._store.partial.size, "the output")
            self._outside.observer.note(f"writing {places.shown}")
            finish(join, places.output)
            self.report.delivered = places.delivery.deliver((*((errors_path(places.output),) if join.openai else ()), places.output))
        self.report.seconds.finish = perf_counter() - began
        self._total()
        if join.openai and self.report.rows_failed and not self._streams:
            self.report.message = f"failed lines: {places.delivery.address(errors_path(places.output))}"

    def _total(self) -> None:
        report, seconds = self.report, self.report.seconds
        self._tally.fill(report)
        report.num_rows = self._rows.stream.num_rows if self._rows is not None else None
        engine = self._generation.engine if self._generation is not None else None
        if engine is not None:
            report.stats = engine.stats
            seconds.take(engine.stats.seconds)
        seconds.io = seconds.finish
        seconds.io += self._store.seconds if self._store is not None else 0.0
        seconds.io += self._rows.seconds + self._rows.stream.seconds if self._rows is not None else 0.0
        seconds.wall = process_age_s()
        report.peak_rss_mb = peak_rss_mb()

    def stopped(self, signum: int) -> None:
        """A signal ended the job, at whatever line: what is finished goes to the disk first. The engine is left as it is."""
        self.report.interrupted = signum
        if self._store is not None and not self._streams:
            self._store.partial.sync()
        self._total()
        if signum == SIGPIPE:
            return
        self.report.message = f"stopped by {Signals(signum).name}: {self._what_is_kept()}"

    def _what_is_kept(self) -> str:
        rows = self._tally.rows_done
        if self._streams:
            return f"{rows:,} rows were finished; a streamed output cannot be resumed"
        way_on = "the same command without --overwrite goes on" if self.asked.output.overwrite else "run the same command again to go on"
        return f"{rows:,} finished rows are kept; {way_on}"

    def close(self) -> None:
        """Close what is open. Files that are needed for going on stay; where nothing was finished, nothing does."""
        if self._store is not None:
            self._store.partial.close()
        self._tidy()

    def _tidy(self) -> None:
        if self._places is not None:
            self._places.tidy()

    def told(self, signum: int) -> None:
        """A signal was not obeyed in time, or came twice: end the process, from whatever thread this is."""
        self._leave(128 + signum, f"stopped by {Signals(signum).name}")

    def hung(self, still: float) -> None:
        """The engine is stuck: end the process so that the job can be run again."""
        self._leave(1, f"no engine step for {still:,.0f} s, so the job is given up (--hang-timeout SECONDS waits longer)")

    def _leave(self, code: int, why: str) -> None:
        """End the process at once, with finished rows on the disk and nothing left that is not needed for going on."""
        actions = [self._tidy, self._remove_temporaries, self._outside.parts.leave]
        if self._store is not None:
            actions.insert(0, self._store.partial.sync)
        for action in actions:
            briefly(action)
        say_last(f"batchinfer: {why}: {self._what_is_kept()}\n")
        os._exit(code)

    def _remove_temporaries(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        elif self._places is not None:
            self._places.remove_temporaries()


def _record_of(outside: Outside) -> dict[str, Any]:
    """What `OUTPUT.report.json` holds: the report, and what a repeated command goes by."""
    report = outside.report
    kept = {"failed_positions": report.failed_positions, "finish_reasons": report.finish_reasons, "delivered": report.delivered}
    return {**outside.parts.report_json(report), **kept}


def _ended_by(error: BaseException) -> int | None:
    """The signal behind an error, SIGPIPE for a reader that went away: what a half-stepped engine raises while it unwinds hides none."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, Interrupted):
            return cause.signum
        if isinstance(cause, ReaderGone):
            return SIGPIPE
        cause = cause.__context__
    return None
