"""AMX, Intel's matrix registers: whether the processor has them, and whether the system lends them to this process."""

from __future__ import annotations

import ctypes
import os
from functools import cache

from batchinfer.machine import read_machine

FEATURES = ("amx_bf16", "amx_int8")  # neither comes without tiles
SYS_ARCH_PRCTL = 158  # on x86-64
ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 0x1023, 18  # Documentation/arch/x86/xstate.rst of Linux


@cache
def has_amx() -> bool:
    """Whether the processor multiplies bf16 and 8-bit tiles."""
    return set(FEATURES) <= set(read_machine().cpu_features)


@cache
def why_not_permitted() -> str | None:
    """Ask the system for the registers, for this process and all its threads; what it answers if it refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_long(value) for value in (SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA))
    if libc.syscall(*arguments) == 0:
        return None
    return f"the system does not permit it ({os.strerror(ctypes.get_errno())})"
