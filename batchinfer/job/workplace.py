"""What an earlier run left beside the output, and what that means for this one."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from batchinfer.config import EngineConfig
from batchinfer.core.request import SamplingParams
from batchinfer.errors import OutputConflict, OutputError
from batchinfer.io.data_file import DataFile
from batchinfer.io.durable import write_whole
from batchinfer.io.manifest import Manifest, normal, try_read_json, try_read_manifest
from batchinfer.io.options import InputOptions, OutputOptions
from batchinfer.io.places import Places
from batchinfer.io.rows import Columns
from batchinfer.io.source import content_digest
from batchinfer.job.arithmetic import allow_resolved
from batchinfer.job.differences import listed, said, said_versions
from batchinfer.job.records import JobObserver

SPARE_BYTES = 1 << 16
TELLING = ("device", "dtype", "kv_cache_dtype", "quantization", "fake_model")  # settings of the engine that can change text
FREE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_kv_blocks",
    "kv_cache_memory",
    "kv_cache",
    "paged",
    "prefix_caching",
    "continuous_batching",
    "chunked_prefill",
    "speculative",
    "num_speculative_tokens",
    "order",
    "threads",
)


class State(StrEnum):
    """How a job begins."""

    FRESH = "fresh"
    RESUMED = "resumed"
    COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """What makes two command lines the same job. `layout` shapes the output but no text; `free` changes neither."""

    fingerprint: dict[str, Any]
    layout: dict[str, Any]
    free: dict[str, Any]
    versions: dict[str, str]
    files: tuple[DataFile, ...] = ()  # of the input


@dataclass(frozen=True, slots=True)
class AskedModel:
    """The model as the job uses it."""

    fingerprint: str
    max_model_len: int
    chat: bool
    defaults: SamplingParams


def identity_of_job(
    config: EngineConfig, options: InputOptions, output: OutputOptions, files: list[list[object]], model: AskedModel | None
) -> dict[str, Any]:
    """Everything that can change text, and only that; `model` None for a job without rows."""
    record: dict[str, Any] = {
        "input": {
            "files": files,
            "offset": options.offset,
            "limit": options.limit,
            "shard": options.shard and options.shard.tag,
            "columns": asdict(Columns.of(options)),
        },
        "rendering": {
            "system_prompt": options.system_prompt,
            "prompt_template": options.prompt_template,
            "on_too_long": options.on_too_long,
            "tools": options.job_chat.tools,
            "chat_template_kwargs": options.job_chat.variables,
        },
        "sampling": {"job_seed": config.seed, "row_params": options.row_params},
        "engine": {name: getattr(config, name) for name in TELLING},
        "result": {"generated_token_ids": output.generated_token_ids, "reasoning_split": output.reasoning_split, "metrics": output.metrics},
    }
    if model is not None:
        record["model"] = model.fingerprint
        record["rendering"] |= {"chat": model.chat, "max_model_len": model.max_model_len}
        record["sampling"] |= asdict(model.defaults)
    return normal(record)


def layout_of(output: OutputOptions) -> dict[str, Any]:
    """What shapes the output file without changing any text."""
    return normal({"keep_columns": output.keep_columns, "drop_columns": output.drop_columns, "prefix": output.prefix})


def free_settings(config: EngineConfig) -> dict[str, Any]:
    """The engine's settings that change no text."""
    return normal({name: getattr(config, name) for name in FREE})


def find_state(places: Places, identity: JobIdentity, output: OutputOptions, observer: JobObserver) -> State:
    """Decide between a fresh start, going on, and nothing to do; `OutputConflict` when what is there is another job's."""
    if output.overwrite:
        clear(places)
        return State.FRESH
    if not places.partial.exists() and (not places.manifest.exists() or places.has_output):
        return _state_of_output(places, identity)
    manifest = try_read_manifest(places.manifest)
    if manifest is None:
        raise OutputConflict(
            f"{places.shown}: unfinished results without a readable {places.manifest.name}; "
            f"--overwrite starts afresh, and {places.partial.name} is lost"
        )
    known = _same_but_for_times(manifest.fingerprint, identity.fingerprint)
    changed = said(allow_resolved(known, identity.fingerprint, manifest.resolved), identity.fingerprint)
    if changed:
        if not _holds_results(places.partial) and not places.has_output:
            clear(places)  # nothing was finished under the other settings
            return State.FRESH
        raise OutputConflict(
            f"{places.shown}: an unfinished job with other settings is here: {listed(changed)}. "
            "Run it with its own settings to go on, give another -o, or start afresh with --overwrite"
        )
    if known != manifest.fingerprint:
        observer.note("the input's date is another one; each finished row is compared with what it was")
    for change in said(manifest.free, identity.free):
        observer.note(f"resumed with another setting, which changes no text: {change}")
    for change in said_versions(manifest.versions, identity.versions):
        observer.warn(f"resumed with another version, which may change texts: {change}")
    return State.RESUMED


def _same_but_for_times(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The old fingerprint with the new one's modification times, where the input's files differ in nothing else."""
    files, files_now = old.get("input", {}).get("files"), new["input"]["files"]
    if not files or len(files) != len(files_now):
        return old
    for (name, size, when), (name_now, size_now, when_now) in zip(files, files_now, strict=True):
        by_time = isinstance(when, int) and isinstance(when_now, int)  # not stdin, which is known by its content
        if (name, size) != (name_now, size_now) or not (by_time or when == when_now):
            return old
    return {**old, "input": {**old["input"], "files": files_now}}


def _state_of_output(places: Places, identity: JobIdentity) -> State:
    if not places.has_output:
        return State.FRESH
    report = try_read_json(places.report) or {}
    saved, now = report.get("fingerprint"), identity.fingerprint
    changed: list[str] = []
    if isinstance(saved, dict):
        known = _same_but_for_times(saved, now)
        if known == saved or report.get("input_digest") == content_digest(identity.files):
            saved = known
        saved = allow_resolved(saved, now, report.get("resolved", {}))
        changed = said(saved, now) + said(report.get("layout", {}), identity.layout)
        if not changed and not places.delivery.is_same(places.output, report.get("delivered", {}).get(places.output.name)):
            changed.append("its bytes are not those that this job sent")
        if not changed:
            return State.COMPLETE
    why = f"is the result of another job ({listed(changed)})" if changed else "exists already and is not this job's"
    raise OutputConflict(f"{places.shown} {why}; give another name with -o, or --overwrite to replace it")


def _holds_results(partial: Path) -> bool:
    try:
        return partial.stat().st_size > 0
    except FileNotFoundError:
        return False


def clear(places: Places) -> None:
    """Remove what belongs to an earlier job, except its output: that is replaced when this job is done."""
    for path in (places.partial, places.manifest, places.report):
        path.unlink(missing_ok=True)


def begin_manifest(places: Places, state: State, identity: JobIdentity, date: datetime) -> None:
    """Put the job's manifest in place before its first result; one that is there stays."""
    if state is State.RESUMED:
        return
    resolved = (try_read_json(places.report) or {}).get("resolved", {}) if state is State.COMPLETE else {}
    Manifest(identity.fingerprint, identity.free, identity.versions, date, resolved).write(places.manifest)


def settle(places: Places, identity: JobIdentity, date: datetime, report: dict[str, Any]) -> None:
    """Leave the report, and only the report, beside the finished output."""
    manifest = try_read_manifest(places.manifest)
    record = {
        **report,
        "fingerprint": identity.fingerprint,
        "layout": identity.layout,
        "date": date.isoformat(),
        "resolved": manifest.resolved if manifest is not None else {},
        "input_digest": content_digest(identity.files),
    }
    write_whole(places.report, json.dumps(record, indent=1, default=str).encode("utf-8", "backslashreplace"))
    places.delivery.deliver([places.report])
    for path in (places.partial, places.manifest, places.spool):  # in this order: a manifest alone means nothing
        path.unlink(missing_ok=True)


def frozen_date(places: Places, output: OutputOptions) -> datetime:
    """The date for templates that print one: that of the run which this one goes on with, else now."""
    if not output.overwrite:
        found = try_read_manifest(places.manifest)
        if found is not None:
            return found.date
        if output.retry_errors:
            try:
                return datetime.fromisoformat((try_read_json(places.report) or {})["date"])
            except (KeyError, TypeError, ValueError):
                pass
    return datetime.now().astimezone()


def check_space(folder: Path, needed: int, doing: str) -> None:
    """Raise `OutputError` when the disk can certainly not hold what is coming."""
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE_BYTES:
        raise OutputError(
            f"No space left on {folder}: {doing} needs some {_in_bytes(needed)} and {_in_bytes(free)} are free; "
            "free some and run the same command again, nothing finished is lost"
        )


def _in_bytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:,.0f} KiB"
