"""Builds the native library once per set of instructions, compiler and torch, and loads it.

The sources need no torch headers: they call torch's stable C interface for its thread pool, and get plain
pointers through ctypes. The same sources are built in three variants, for AVX-512 with AMX, for AVX-512 and for AVX2;
the processor decides which one is used.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from batchinfer.config import cache_root
from batchinfer.errors import ConfigError
from batchinfer.machine import usable_cores
from batchinfer.ops.native.amx import has_amx, why_not_permitted

FOLDER = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno")
COMPILERS = ("g++", "c++")  # the sources use GCC's vector shuffles
BUILD_TIMEOUT_S = 120
KEPT = 8  # libraries in the cache: of other versions, compilers and variants
SWITCH = "BATCHINFER_NATIVE"


@dataclass(frozen=True, slots=True)
class Variant:
    """A set of instructions that the sources are compiled for: macros that say what the compiler makes of the flag."""

    name: str
    title: str
    flags: tuple[str, ...]
    needs: tuple[str, ...]
    extras: tuple[tuple[str, str], ...] = ()  # macro and name of what not every such processor has


AVX512 = Variant(
    "avx512",
    "AVX-512",
    ("-march=native",),
    ("__AVX512F__", "__AVX512BW__", "__AVX512VL__", "__AVX512DQ__", "__FMA__"),
    (("__AVX512VNNI__", "VNNI"), ("__AVX512BF16__", "BF16")),
)
AMX = Variant(
    "amx",
    AVX512.title,
    (*AVX512.flags, "-mamx-tile", "-mamx-bf16", "-mamx-int8", "-DBATCHINFER_AMX"),
    (*AVX512.needs, "__AVX512VNNI__", "__AVX512BF16__", "__AMX_TILE__", "__AMX_BF16__", "__AMX_INT8__"),
    (*AVX512.extras, ("__AMX_TILE__", "AMX")),
)
AVX2 = Variant("avx2", "AVX2", ("-march=x86-64-v3",), ("__AVX2__", "__FMA__"))
VARIANTS = (AMX, AVX512, AVX2)  # best first: a processor that runs one runs those after it


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The loaded library and what it was built for, or why there is none."""

    library: ctypes.CDLL | None
    reason: str
    variant: str | None = None  # "amx", "avx512" or "avx2"
    is_new: bool = False  # built by this process
    target: str = "none"  # the instructions in words, such as "AVX-512 (VNNI, BF16)": libraries of other targets may round otherwise


def load_native() -> NativeLibrary:
    """Load the library, building it if this machine has not built it yet; where there is none, the reason says why.

    Raises `ConfigError` for a value of `BATCHINFER_NATIVE` that means nothing.
    """
    wanted = os.environ.get(SWITCH, "").strip().lower() or "on"
    if wanted not in ("on", "off", AVX512.name, AVX2.name):
        raise ConfigError(
            f"{SWITCH}={wanted}: must be on, off, {AVX512.name} or {AVX2.name} (the variants for processors without AMX, without AVX-512)"
        )
    if wanted == "off":
        return NativeLibrary(None, f"switched off by {SWITCH}")
    best = best_variant()
    if best is None:
        return NativeLibrary(None, "this processor has neither AVX2 nor AVX-512")
    if wanted == AVX512.name and best is AVX2:
        return NativeLibrary(None, f"this processor has no AVX-512, which {SWITCH} asks for")
    given = os.environ.get("CXX") or next((name for name in COMPILERS if shutil.which(name)), None)
    if given is None:
        return NativeLibrary(None, "no g++ found; install it for a faster run")
    asked = next((variant for variant in VARIANTS if variant.name == wanted), best)
    return _load_amx(given) if asked is AMX else _load(given, asked)


def best_variant() -> Variant | None:
    """What this processor can run (and `ATEN_CPU_CAPABILITY` leaves to torch); None on other kinds of processors."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        return AMX if has_amx() else AVX512
    return AVX2 if capability.startswith("AVX2") else None


def _load_amx(compiler: str) -> NativeLibrary:
    """With AMX where system and compiler allow it; else without, and the reason says why."""
    refused = why_not_permitted()
    native = _load(compiler, AMX) if refused is None else NativeLibrary(None, refused)
    if native.library is not None:
        return native
    without = _load(compiler, AVX512)
    return without if without.library is None else replace(without, reason=f"{without.reason}, without AMX: {native.reason}")


@cache
def _load(compiler: str, variant: Variant) -> NativeLibrary:
    command = shlex.split(compiler)
    try:
        macros = _run([*command, *variant.flags, "-dM", "-E", "-x", "c++", os.devnull])
        defined = {line.split()[1] for line in macros.splitlines()}
        lacking = [name for name in variant.needs if name not in defined]
        if lacking:
            return NativeLibrary(None, f"{compiler} {variant.flags[0]} knows no {', '.join(lacking)}; install a newer g++")
        extras = ", ".join(title for macro, title in variant.extras if macro in defined)
        target = f"{variant.title} ({extras})" if extras else variant.title
        place, is_new = _built(command, variant, macros)
        library = ctypes.CDLL(str(place))
    except subprocess.CalledProcessError as err:
        return NativeLibrary(None, f"{compiler} failed: {_last_line(err.stderr)}")
    except (OSError, subprocess.TimeoutExpired) as err:
        return NativeLibrary(None, f"could not be built or loaded: {err}")
    return NativeLibrary(library, f"built with {compiler} for {target}", variant.name, is_new, target)


def _built(command: list[str], variant: Variant, macros: str) -> tuple[Path, bool]:
    """The library's file, built if it is not there, and whether it was. `macros`: the compiler's version, and the instructions that it uses."""
    sources, headers = sorted(FOLDER.glob("*.cpp")), sorted(FOLDER.glob("*.h"))
    facts = [*(f"{path.name}\0{path.read_text()}" for path in (*sources, *headers)), macros, *command, *FLAGS, torch.__version__]
    key = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:24]
    target = cache_root() / "native" / f"batchinfer-{variant.name}-{key}.so"
    if target.exists():
        with suppress(OSError):
            os.utime(target)  # in use: younger than those that may be deleted
        return target, False
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        with tempfile.TemporaryDirectory(prefix="batchinfer-build-") as folder:
            _compile([*command, *FLAGS, *variant.flags], sources, Path(folder), scratch)
        scratch.replace(target)  # whole or not at all: two first runs may build side by side
    finally:
        scratch.unlink(missing_ok=True)
    _delete_oldest(target.parent)
    return target, True


def _compile(command: list[str], sources: list[Path], folder: Path, target: Path) -> None:
    """Compile the sources beside each other and link them against torch's thread pool."""
    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(max(1, usable_cores())) as pool:
        for _ in pool.map(lambda pair: _run([*command, "-c", str(pair[0]), "-o", str(pair[1])]), zip(sources, objects, strict=True)):
            pass  # the first failure is raised here
    libraries = Path(torch.__file__).parent / "lib"
    linked = [f"-L{libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
    _run([*command, "-shared", "-o", str(target), *map(str, objects), *linked])


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=BUILD_TIMEOUT_S).stdout


def _delete_oldest(folder: Path) -> None:
    """Keep the libraries that were used last. One that a process has loaded lives on until that process ends."""
    with suppress(OSError):
        libraries = sorted(folder.glob("batchinfer-*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in libraries[KEPT:]:
            path.unlink(missing_ok=True)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines() or ["no message"]
    return lines[0][:200]
