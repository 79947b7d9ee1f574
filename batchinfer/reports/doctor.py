"""Findings about a machine: what is there, what was chosen, and what is wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from batchinfer.config import cache_root
from batchinfer.machine import read_machine, read_memory, read_versions, usable_cores
from batchinfer.reports.wording import in_bytes

LEAST_MEMORY = 2 << 30  # bytes below which even the smallest model is cramped
TESTED_SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # (out, in) of the default model's layers
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
    for look in (_machine, _versions, _devices, _kernels, _caches):
        try:
            look(findings, threads)
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
    if memory.free < LEAST_MEMORY:
        findings.problems.append(f"only {in_bytes(memory.free)} of memory is free: even a small model may not fit")
    if threads is not None and threads > usable_cores():
        findings.problems.append(
            f"--threads {threads} is more than the {usable_cores()} cores that this process may use: slower, not faster"
        )


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


def _kernels(findings: Findings, threads: int | None) -> None:
    import torch

    from batchinfer.errors import BatchInferError
    from batchinfer.runtime.device import choose_target
    from batchinfer.runtime.self_test import linear_shapes_that_differ

    if threads is not None:
        torch.set_num_threads(threads)
    section = findings.section("number format, unless --dtype says otherwise")
    for own, quantised in {"bf16": False, "float32": False, "quantised": True}.items():
        chosen = next(c for c in choose_target("auto", "auto", own, quantised).choices if c.operation == "dtype")
        section.add(f"{own} weights", f"{chosen.chosen} ({chosen.reason})")
    _attention(findings)
    for dtype in ("bf16", "float32"):
        section = findings.section(f"kernels, {dtype}")
        try:
            target = choose_target("auto", dtype, dtype, False)
        except BatchInferError as error:
            section.add("not here", str(error))
            continue
        for choice in target.choices:
            if choice.operation != "dtype":  # the title says it, and nobody asked for it
                section.add(choice.operation, f"{choice.chosen} ({choice.reason})")
        if target.device.type == "cpu":
            differ = linear_shapes_that_differ(target, TESTED_SHAPES)
            section.add("self-test", "a row's linear products do not depend on its neighbours" if not differ else "failed")
            if differ:
                shapes = ", ".join(f"{o}x{i}" for o, i in differ)
                findings.problems.append(
                    f"{dtype} linear layers of shape {shapes} give a row other bits beside other neighbours: the same job gives the same "
                    "bytes, but other settings may differ where two candidates lie within rounding"
                )


def _attention(findings: Findings) -> None:
    import torch

    from batchinfer.ops.native.library import load_native

    section = findings.section("attention")
    if torch.cuda.is_available():
        section.add("cuda", "plain torch; the only one for this device in this version")
    native = load_native()
    if native.library is not None:
        section.add("cpu", f"native library ({native.reason})")
        return
    section.add("cpu", f"plain torch, slower ({native.reason})")
    if "BATCHINFER_NATIVE" not in native.reason:
        findings.problems.append(f"the native attention library is not used: {native.reason}")


def _caches(findings: Findings, threads: int | None) -> None:
    from batchinfer.weights.fetch import hub_cache

    section = findings.section("caches")
    root = cache_root()
    for name, path in {"batchinfer": root, "hub": hub_cache()}.items():
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
