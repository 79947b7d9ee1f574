"""Runs the linear self-test once per machine and remembers the verdict."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import torch

from batchinfer.config import cache_root
from batchinfer.layers.linear_check import ROW_COUNTS, WINDOWS, differing_row_counts
from batchinfer.machine import read_machine
from batchinfer.runtime.device import ComputeTarget


def linear_shapes_that_differ(target: ComputeTarget, shapes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of the layer shapes (out, in), those whose rows see their neighbours on this machine; [] is the strong promise.

    On a GPU the promise is not made and nothing is tested. Verdicts are cached by processor, torch version, threads,
    dtype and shapes.
    """
    if target.device.type != "cpu":
        return []
    place = _cache_file(target, shapes)
    try:
        return [(int(o), int(i)) for o, i in json.loads(place.read_text())["differ"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not tested here yet
    packs = dict.fromkeys((target.linear.pack, target.linear.head_pack))  # both for every shape: which is which matters little
    differ = [shape for shape in shapes if any(differing_row_counts(pack, target.ops, shape, target.dtype) for pack in packs)]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        scratch = place.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(json.dumps({"differ": differ}))
        scratch.replace(place)
    except OSError:
        pass  # a cache that cannot be written costs a fraction of a second at the next start
    return differ


def _cache_file(target: ComputeTarget, shapes: list[tuple[int, int]]) -> Path:
    facts = [
        read_machine().cpu,
        torch.__version__,
        torch.get_num_threads(),
        target.dtype_name,
        target.linear.name,
        sorted(set(shapes)),
        ROW_COUNTS,
        WINDOWS,
    ]
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
    return cache_root() / "self-test" / f"linear-{name}.json"
