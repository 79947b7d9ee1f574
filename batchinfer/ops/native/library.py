"""Builds the native library once per processor, compiler and torch, and loads it.

The sources need no torch headers: they call torch's stable C interface for its thread pool, and get plain
pointers through ctypes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from batchinfer.config import cache_root
from batchinfer.machine import read_machine

FOLDER = Path(__file__).parent
SOURCES = ("attention.cpp", "rowwise.cpp")
HEADERS = ("vector.h",)
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-fno-math-errno")
COMPILERS = ("g++", "c++")  # the sources use GCC's vector shuffles
BUILD_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The loaded library, or why there is none."""

    library: ctypes.CDLL | None
    reason: str


def load_native() -> NativeLibrary:
    """Load the library, building it if this machine has not built it yet. Never raises: the reason says what failed."""
    if os.environ.get("BATCHINFER_NATIVE", "on").lower() in ("off", "0", "no"):
        return NativeLibrary(None, "switched off by BATCHINFER_NATIVE")
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        return NativeLibrary(None, "this processor has neither AVX2 nor AVX-512")
    compiler = os.environ.get("CXX") or next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        return NativeLibrary(None, "no g++ found; install it for a faster run")
    return _load(compiler)


@cache
def _load(compiler: str) -> NativeLibrary:
    try:
        return NativeLibrary(ctypes.CDLL(str(_built(compiler))), f"built with {compiler} for this processor")
    except subprocess.CalledProcessError as err:
        return NativeLibrary(None, f"{compiler} failed: {_last_line(err.stderr)}")
    except (OSError, subprocess.TimeoutExpired) as err:
        return NativeLibrary(None, f"could not be built or loaded: {err}")


def _built(compiler: str) -> Path:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=BUILD_TIMEOUT_S).stdout
    machine = read_machine()
    sources = [(FOLDER / name).read_text() for name in SOURCES + HEADERS]
    facts = (*sources, version, " ".join(FLAGS), torch.__version__, machine.cpu, " ".join(machine.cpu_features))
    key = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:24]
    target = cache_root() / "native" / f"batchinfer-{key}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    libraries = Path(torch.__file__).parent / "lib"
    scratch = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        command = [
            compiler,
            *FLAGS,
            "-o",
            str(scratch),
            *(str(FOLDER / name) for name in SOURCES),
            f"-L{libraries}",
            "-ltorch_cpu",
            "-lc10",
            f"-Wl,-rpath,{libraries}",
        ]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=BUILD_TIMEOUT_S)
        scratch.replace(target)  # whole or not at all: two first runs may build side by side
    finally:
        scratch.unlink(missing_ok=True)
    return target


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines() or ["no message"]
    return lines[0][:200]
