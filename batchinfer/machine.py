"""What this machine is: processor, memory and its limits, versions, and how fast its Python runs."""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

REFERENCE_LOOP_SECONDS = 0.295  # what SPEED_LOOP takes on a reference machine
SPEED_LOOP = compile("for i in range(10**7): pass", "<speed loop>", "exec")
REPORTED_PACKAGES = ("batchinfer", "torch", "numpy", "tokenizers", "safetensors", "gguf", "pyarrow")
TELLING_CPU_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_bf16",
    "amx_int8",
)
ARM_CPU_FLAGS = ("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory: the machine's, what is available now, and the cgroup's limit and use where there is one.

    What the system keeps of files and can drop at any time is available, and not in use; so are weights in a mapped file.
    """

    total: int
    available: int
    cgroup_limit: int | None
    cgroup_used: int | None

    @property
    def free(self) -> int:
        """Bytes that this process can still take."""
        if self.cgroup_limit is None:
            return self.available
        return max(0, min(self.available, self.cgroup_limit - (self.cgroup_used or 0)))


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts that a report names beside its numbers."""

    system: str
    cpu: str
    cores: int  # that this process may use
    cpu_features: tuple[str, ...]
    memory_gib: float
    python: str

    def as_dict(self) -> dict[str, Any]:
        """For a JSON report."""
        return asdict(self)


def read_machine() -> Machine:
    """The machine that this process runs on."""
    info = _cpu_info()
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=info.get("model name") or platform.processor() or platform.machine(),
        cores=usable_cores(),
        cpu_features=_telling_features(info.get("flags") or info.get("Features") or ""),
        memory_gib=round(read_memory().total / 2**30, 1),
        python=platform.python_version(),
    )


def usable_cores() -> int:
    """Processor cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1


def largest_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the largest cache of the first processor, which others may share; 0 where the system does not tell."""
    sizes = [0]
    for path in folder.glob("index*/size"):
        try:
            text = path.read_text().strip()
            sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0))
        except (OSError, ValueError):
            continue
    return max(sizes)


def read_memory() -> Memory:
    """Memory of the machine and of the cgroup."""
    info = _meminfo()
    total = info.get("MemTotal") or _sysconf_bytes("SC_PHYS_PAGES")
    limit, used = _cgroup_memory()
    if limit is not None and limit >= total:
        limit, used = None, None
    return Memory(total, info.get("MemAvailable") or _sysconf_bytes("SC_AVPHYS_PAGES") or total, limit, used)


def read_versions() -> dict[str, str]:
    """Versions of what can change a result or its speed; packages that are not installed are left out."""
    from batchinfer.version import __version__

    versions = {"python": platform.python_version(), "batchinfer": __version__}
    for name in REPORTED_PACKAGES[1:]:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def peak_rss_mb() -> float:
    """The most memory that this process has held at once, in megabytes (10^6 bytes)."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak * (1 if sys.platform == "darwin" else 1024) / 1e6, 1)


def process_age_s() -> float:
    """Seconds since this process was started, interpreter start included; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


def speed_factor(repeats: int = 3) -> float:
    """How many times slower this machine's Python is than the one that host-cost targets are stated for (best of `repeats`)."""
    best = min(_time_speed_loop() for _ in range(repeats))
    return best / REFERENCE_LOOP_SECONDS


def _time_speed_loop() -> float:
    start = time.perf_counter()
    exec(SPEED_LOOP, {})  # at module level: names are globals there, which is what the reference measured
    return time.perf_counter() - start


def _cpu_info() -> dict[str, str]:
    info: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            info.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    return info


def _telling_features(flags: str) -> tuple[str, ...]:
    present = frozenset(flags.split())
    return tuple(name for name in TELLING_CPU_FLAGS + ARM_CPU_FLAGS if name in present)


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if len(line.split()) >= 2}


def _sysconf_bytes(name: str) -> int:
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


def _cgroup_memory() -> tuple[int | None, int | None]:
    """Limit and use of the tightest cgroup above this process (version 2, else 1)."""
    tightest: tuple[int | None, int | None] = (None, None)
    for folder, limit_name, used_name in _cgroup_folders():
        limit, used = _number_in(folder / limit_name), _number_in(folder / used_name)
        if used is not None:
            used = max(0, used - _cached_bytes(folder / "memory.stat"))
        if limit is not None and (tightest[0] is None or limit - (used or 0) < tightest[0] - (tightest[1] or 0)):
            tightest = (limit, used)
    return tightest


def _cgroup_folders() -> list[tuple[Path, str, str]]:
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[Path, str, str]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = base / path.strip("/")
        found += [(each, *names) for each in (folder, *folder.parents) if each == base or base in each.parents]
    return found


def _cached_bytes(stat: Path) -> int:
    """Bytes of files that a cgroup's processes have read or written, those of the groups inside it included."""
    try:
        numbers = dict(line.split() for line in stat.read_text().splitlines())
        names = ("inactive_file", "active_file")
        prefix = "total_" if "total_inactive_file" in numbers else ""  # version 1 tells a group's own beside them
        return sum(int(numbers.get(prefix + name, 0)) for name in names)
    except (OSError, ValueError):
        return 0


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
