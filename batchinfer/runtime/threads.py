"""How the worker threads of torch's operations wait for each other. Imports no torch: it must run before."""

from __future__ import annotations

import os
import sys

SPINS = "3000"


def wait_politely() -> None:
    """Let idle OpenMP threads spin briefly, then sleep; unless the user chose otherwise or torch is loaded already.

    A step is a thousand short parallel operations. GNU OpenMP's default is to spin for ever: then, beside one other
    busy process, every barrier waits for a thread that lost its processor. Sleeping at once costs a fifth to a third
    of the small products. Measured on two cores, a step of 8 rows beside two busy processes: spinning for ever over
    10 s, 3,000 spins 84 ms, sleeping at once 47 ms; a bf16 product of 64 rows with nothing else running: 409, 412
    and 320 GFLOP/s.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
