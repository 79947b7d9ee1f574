"""Findings about a machine: what is there, what was chosen, and what is wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from batchinfer.config import cache_root
from batchinfer.errors import BatchInferError, ConfigError
from batchinfer.machine import read_machine, read_memory, read_versions, usable_cores
from batchinfer.reports.wording import in_bytes

LEAST_MEMORY = 2 << 30  # bytes below which even the smallest model is cramped
TESTED_SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # (out, in) of the default model's layers
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LARGE_PAGES_MEAN = {
    "always": "always: the KV pool and everything else large gets them",
    "madvise": "madvise: the KV pool asks for them",
    "never": "never: attention over a large KV pool is slower (root can write madvise to /sys/kernel/mm/transparent_hugepage/enabled)",
}
GPU_DEVICE_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")


@dataclass(slots=True)
class Section:
    """Lines under one title: a name and what was found."""

    title: str
    lines: list[tuple[str, str]] = field(default_factory=list)

    def add(self, name: str, text: str) -> None:
        """Add one line."""
        self.lines.append((name, text))


@dataclass(slots=True)
class Findings:
    """All that was found."""

    sections: list[Section] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # to be said loudly
    fatal: bool = False  # no model can run here

    def section(self, title: str) -> Section:
        """A new section."""
        self.sections.append(Section(title))
        return self.sections[-1]


def examine(threads: int | None = None) -> Findings:
    """Look at everything; a part that fails is a finding, never the end of the examination."""
    findings = Findings()
    for look in (_machine, _versions, _devices, _number_formats, _native, _kernels, _caches):
        try:
            look(findings, threads)
        except ConfigError as error:  # a setting of the environment, which says itself what is wrong with it
            findings.problems.append(str(error))
        except Exception as error:  # one broken part must not hide the others
            findings.problems.append(f"{look.__name__.strip('_')} could not be examined: {type(error).__name__}: {error}")
    return findings


def _machine(findings: Findings, threads: int | None) -> None:
    section, machine, memory = findings.section("machine"), read_machine(), read_memory()
    section.add("system", machine.system)
    section.add("processor", f"{machine.cpu}, {machine.cores} cores usable" + (f", {threads} threads asked for" if threads else ""))
    section.add("features", ", ".join(machine.cpu_features) or "none that matter here")
    section.add("memory", f"{in_bytes(memory.total)}, {in_bytes(memory.available)} available")
    if memory.cgroup_limit is not None:
        section.add("memory limit", f"{in_bytes(memory.cgroup_limit)} by the cgroup, {in_bytes(memory.cgroup_used or 0)} of it used")
    section.add("large pages", large_pages())
    if memory.free < LEAST_MEMORY:
        findings.problems.append(f"only {in_bytes(memory.free)} of memory is free: even a small model may not fit")
    if threads is not None and threads > usable_cores():
        findings.problems.append(
            f"--threads {threads} is more than the {usable_cores()} cores that this process may use: slower, not faster"
        )


def large_pages(setting: Path = LARGE_PAGES) -> str:
    """What the kernel does about large pages for the KV pool, and what that means."""
    try:
        chosen = setting.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        chosen = ""
    return LARGE_PAGES_MEAN.get(chosen, "the system does not say; the KV pool asks for them where it can")


def _versions(findings: Findings, threads: int | None) -> None:
    section = findings.section("versions")
    for name, version in read_versions().items():
        section.add(name, version)


def _devices(findings: Findings, threads: int | None) -> None:
    section = findings.section("devices")
    try:
        import torch
    except ImportError as error:
        findings.problems.append(f"torch cannot be imported ({error}): no model can run")
        findings.fatal = True
        return
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    section.add(
        "cpu", f"{torch.get_num_threads()} threads by default, {torch.backends.cpu.get_cpu_capability()}, oneDNN {_yes(has_onednn)}"
    )
    usable = torch.cuda.is_available()
    for index in range(torch.cuda.device_count() if usable else 0):
        facts = torch.cuda.get_device_properties(index)
        section.add(f"cuda:{index}", f"{facts.name}, {in_bytes(facts.total_memory)}, compute {facts.major}.{facts.minor}")
        problem = unusable_gpu(f"sm_{facts.major}{facts.minor}", torch.cuda.get_arch_list())
        if problem:
            findings.problems.append(f"cuda:{index}, {facts.name}: {problem}")
    if not usable:
        seen = gpus_seen()
        section.add("cuda", "no GPU" if not seen else "a GPU is there, but this torch cannot use it")
        if seen:
            why = (
                "this torch was built without CUDA"
                if torch.version.cuda is None
                else f"torch is built for CUDA {torch.version.cuda}; the driver may be older"
            )
            findings.problems.append(
                f"GPU NOT USED: {', '.join(seen)} is in this machine, but {why}. Install a torch for your driver (https://pytorch.org)"
            )


def unusable_gpu(architecture: str, built_for: list[str]) -> str | None:
    """Why a torch that was built for these architectures cannot run on this one; None when it can."""
    major = architecture.removeprefix("sm_")[:-1]
    same_family = any(name.startswith(f"sm_{major}") and name[len("sm_") + len(major) :].isdigit() for name in built_for)
    compiles = any(
        name.startswith("compute_") and int(name.removeprefix("compute_")) <= int(architecture.removeprefix("sm_"))
        for name in built_for
        if name.removeprefix("compute_").isdigit()
    )
    if not built_for or same_family or compiles:
        return None
    return f"this torch has no kernels for {architecture} (it has {', '.join(built_for)})"


def gpus_seen() -> list[str]:
    """GPUs that the machine shows without torch's help."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        try:
            shown = subprocess.run(
                [tool, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=10, check=False
            )
            names = [line.strip() for line in shown.stdout.splitlines() if line.strip()]
            if shown.returncode == 0 and names:
                return names
        except (OSError, subprocess.TimeoutExpired):
            pass
    return ["an NVIDIA GPU"] if any(os.path.exists(path) for path in GPU_DEVICE_FILES) else []


def _number_formats(findings: Findings, threads: int | None) -> None:
    import torch

    from batchinfer.runtime.device import Wanted, choose_target

    if threads is not None:
        torch.set_num_threads(threads)
    section = findings.section("number format, unless --dtype says otherwise")
    for own, quantised in {"bf16": False, "float32": False, "quantised": True}.items():
        chosen = next(c for c in choose_target(Wanted(), own, quantised).choices if c.operation == "dtype")
        section.add(f"{own} weights", f"{chosen.chosen} ({chosen.reason})")


def _native(findings: Findings, threads: int | None) -> None:
    from batchinfer.ops.native.library import SWITCH, load_native

    section, native = findings.section("native library"), load_native()
    if native.library is None:
        section.add("cpu", f"plain torch, slower ({native.reason})")
        if SWITCH not in native.reason:
            findings.problems.append(f"the native library is not used, which makes a run several times slower: {native.reason}")
        return
    section.add("cpu", f"native library ({native.reason})")
    others = [f"{SWITCH}=off takes plain torch, slower"]
    if native.variant == "amx":
        others.append(f"{SWITCH}=avx512 the variant for processors without AMX")
    if native.variant != "avx2":
        others.append(f"{SWITCH}=avx2 the variant for processors without AVX-512")
    section.add("otherwise", "; ".join(others))


def _kernels(findings: Findings, threads: int | None) -> None:
    for dtype, quantization in (("bf16", "none"), ("float32", "none"), ("auto", "int8"), ("auto", "int4")):
        section = findings.section(f"kernels, {dtype}" if quantization == "none" else f"kernels, --quantization {quantization}")
        try:
            _list_kernels(findings, section, dtype, quantization)
        except BatchInferError as error:
            section.add("not here", str(error))


def _list_kernels(findings: Findings, section: Section, dtype: str, quantization: str) -> None:
    """Each operation's kernel and why, and what the self-test says. Raises `BatchInferError` for what cannot run here."""
    from batchinfer.runtime.device import Wanted, choose_target
    from batchinfer.runtime.sampler import choose_sampler
    from batchinfer.runtime.self_test import linear_self_test

    target = choose_target(Wanted("auto", dtype, quantization), "bf16" if dtype == "auto" else dtype, False)
    for choice in target.choices:
        if choice.operation not in ("dtype", "quantization"):  # the title says them, and nobody asked
            section.add(choice.operation, f"{choice.chosen} ({choice.reason})")
    if target.device.type != "cpu":
        return
    used = "native" if target.native.library is not None else "reference, slower"
    section.add("attention", f"{used} ({target.native.reason}); keys and values in {target.dtype_name} or int8")
    sampling = choose_sampler(target, 1)[1]
    section.add(sampling.operation, f"{sampling.chosen} ({sampling.reason})")
    if quantization == "int8":
        _int8_facts(section)
    differ = linear_self_test(target, TESTED_SHAPES).value
    section.add("self-test", "a row's linear products do not depend on its neighbours" if not differ else "failed")
    if differ:
        shapes = ", ".join(f"{o}x{i}" for o, i in differ)
        findings.problems.append(
            f"{dtype if quantization == 'none' else quantization} linear layers of shape {shapes} give a row other bits beside other "
            "neighbours: the same job gives the same bytes, but other settings may differ where two candidates lie within rounding"
        )


def _int8_facts(section: Section) -> None:
    from batchinfer.layers.linear import pack_int8
    from batchinfer.layers.linear_check import int8_product_saturates
    from batchinfer.runtime.device import Wanted, choose_target
    from batchinfer.runtime.gain import int8_speed_up

    exact = "no: the multiply-add saturates" if int8_product_saturates(pack_int8) else "yes"
    section.add("exact sums", f"{exact} (8-bit products of the largest numbers, against sums of integers)")
    own = choose_target(Wanted(), "bf16", False)
    times = int8_speed_up(own, TESTED_SHAPES)
    section.add("speed", "products no faster than without" if times is None else f"products {times:.1f}x as fast as in {own.dtype_name}")


def _caches(findings: Findings, threads: int | None) -> None:
    from batchinfer.weights.fetch import hub_cache
    from batchinfer.weights.packed_shelf import packed_folder

    section = findings.section("caches")
    root = cache_root()
    for name, path in {"batchinfer": root, "packed weights": packed_folder(), "hub": hub_cache()}.items():
        section.add(name, f"{path} ({in_bytes(size_of(path))})" if path.exists() else f"{path} (not there yet)")
    shelf = os.environ.get("BATCHINFER_MODELS")
    section.add("models folder", shelf or "none (BATCHINFER_MODELS names one)")
    nearest = next((p for p in (root, *root.parents) if p.exists()), Path("/"))
    if not os.access(nearest, os.W_OK):
        findings.problems.append(f"the cache folder {root} cannot be written: models are fetched again each time; set BATCHINFER_CACHE")
    section.add("free disk", in_bytes(shutil.disk_usage(nearest).free))


def size_of(folder: Path) -> int:
    """Bytes of the files under a folder; links are not followed."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                facts = os.lstat(os.path.join(path, name))
            except OSError:
                continue
            total += facts.st_size
    return total


def _yes(found: bool) -> str:
    return "yes" if found else "no"
