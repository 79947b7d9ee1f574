"""What an engine's automatic choices came out as: a job goes on only in the arithmetic in which it began."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.errors import OutputConflict
from batchinfer.io.manifest import normal, try_read_manifest
from batchinfer.job.records import JobObserver

if TYPE_CHECKING:
    from batchinfer.engine import Engine

BY_FLAG = ("device", "dtype", "kv_cache_dtype")
LIBRARY = "native"  # what the native library is built for, "none" without one
BY_MACHINE = (LIBRARY, "matmul", "attention", "rms_norm", "silu_and_mul", "sampling")
LONGEST = "longest_row"
SWITCHES = {"attention": "--no-flash-attention", **dict.fromkeys(("rms_norm", "silu_and_mul", "sampling"), "--enforce-eager")}


def allow_resolved(old: dict[str, Any], new: dict[str, Any], resolved: dict[str, Any]) -> dict[str, Any]:
    """The old fingerprint, with the new one's setting where that may come out as the old one did.

    `auto` is looked at once the engine stands; a setting given now may be what `auto` came out as then.
    """
    engine, engine_now = dict(old.get("engine", {})), new.get("engine", {})
    for name in BY_FLAG:
        if name in resolved and engine_now.get(name) in ("auto", resolved[name]):
            engine[name] = engine_now[name]
    return {**old, "engine": engine}


def keep_arithmetic(manifest_path: Path, engine: Engine, num_stored: int, observer: JobObserver) -> None:
    """Hold what the engine's settings came out as against the rows that are stored already, and write it down."""
    manifest = try_read_manifest(manifest_path)
    if manifest is None:
        return
    settings = engine.settings
    now = {name: settings[name] for name in (*BY_FLAG, *BY_MACHINE) if name in settings}
    now[LONGEST] = min(engine.limits.max_model_len, engine.limits.pool_tokens + 1)
    now, before = normal(now), manifest.resolved
    if num_stored and before:
        for name in (*BY_FLAG, *BY_MACHINE):
            if name in before and before[name] != now.get(name):
                was, is_now = (str(found.get(name)).removesuffix(", slower") for found in (before, now))
                what = "native library" if name == LIBRARY else name
                raise OutputConflict(
                    f"the finished rows were computed with {what} {was}; now it comes out as {is_now}, "
                    f"which may change texts: {_way_back(name, was, is_now)}, or start afresh with --overwrite"
                )
        if before.get(LONGEST) != now[LONGEST]:
            observer.warn(
                f"the KV pool and context hold rows of {now[LONGEST]:,} tokens, {before.get(LONGEST, 0):,} when the job began: "
                "answers that were cut there are as long as the pool of their run"
            )
        if settings.get("batch_invariant") is False:
            observer.note("on this device a text may depend on the rows beside it: a resumed job may differ from one in one go")
    if before != now:
        replace(manifest, resolved=now).write(manifest_path)


def _way_back(name: str, value: str, now: str) -> str:
    if name in BY_FLAG:
        return f"go on with --{name.replace('_', '-')} {value}"
    if name == "matmul":
        return "go on where products come out as they did (batchinfer doctor says how they are made here)"
    if value == "AVX2":
        return "go on with BATCHINFER_NATIVE=avx2 in the environment"
    if value == now.replace(", AMX", "") and value != now:
        return "go on with BATCHINFER_NATIVE=avx512 in the environment"
    if value == "none":
        return "go on with BATCHINFER_NATIVE=off in the environment"
    flag = SWITCHES.get(name)
    if value == "reference" and flag is not None:
        return f"go on with {flag}"
    without = "" if flag is None else f" and without {flag}"
    return f"go on where the native kernels run as they did, with BATCHINFER_NATIVE=on{without} (batchinfer doctor says what they are here)"
