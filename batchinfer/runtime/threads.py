"""How the worker threads of torch's operations wait for each other. Imports no torch: it must run before."""

from __future__ import annotations

import os
import sys


def wait_politely() -> None:
    """Let idle OpenMP threads sleep instead of spinning, unless the user chose otherwise or torch is loaded already.

    A step is a thousand short parallel operations. Spinning saves microseconds on each while nothing else runs, but
    beside one other busy process every barrier waits for a thread that lost its processor: a step of 16 rows took
    over ten seconds instead of 0.13 (measured, two cores under load).
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
