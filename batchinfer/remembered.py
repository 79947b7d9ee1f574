"""Facts about this machine that are measured once and kept in the cache folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from batchinfer.config import cache_root
from batchinfer.machine import read_machine

LIBRARY_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")


@dataclass(frozen=True, slots=True)
class Known:
    """A fact, and whether this process measured it."""

    value: Any  # as JSON keeps it
    measured: bool


def processor_facts() -> list[object]:
    """What decides which instructions a matrix library uses: the processor, and the variables that tell it."""
    machine = read_machine()
    return [machine.cpu, machine.cpu_features, {name: os.environ.get(name) for name in LIBRARY_VARIABLES}]


def remembered(kind: str, facts: object, measure: Callable[[], Any]) -> Known:
    """What `measure` says, from the cache where it was measured before.

    `facts` are what it depends on, as JSON, beside the processor and the variables that tell matrix libraries which of
    its instructions to use. A cache that cannot be read or written only costs the time to measure.
    """
    about = [*processor_facts(), facts]
    digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]
    place = cache_root() / kind / f"{digest}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        return Known(json.loads(place.read_text())["value"], measured=False)
    value = json.loads(json.dumps(measure()))
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        scratch = place.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(json.dumps({"about": about, "value": value}))
        scratch.replace(place)
    return Known(value, measured=True)
