"""The engines that are compared: what command answers a job, in which environment, and where its figures are read."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchinfer.machine import read_versions
from tests.peers.jobs import Figure, Job

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
VERSION_TIMEOUT_S = 120
LEAST_MODEL_LEN = 2048
# Settings of these libraries that happen to be set where the script runs would not be on the command lines that it shows.
FOREIGN_SETTINGS = re.compile(r"(OMP|GOMP|KMP|MKL|VLLM)_.*|LD_PRELOAD|PYTHONPATH")
TCMALLOC = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")


@dataclass(frozen=True, slots=True)
class Command:
    """A command line. `report`: the JSON file that it writes; without one its figures are JSON on stdout. `answers`: JSONL, a line a row."""

    argv: list[str]
    env: Mapping[str, str] = field(default_factory=dict)  # beside the environment of the script itself
    report: Path | None = None
    answers: Path | None = None

    @property
    def line(self) -> str:
        """As a shell takes it."""
        return shlex.join([*(f"{name}={value}" for name, value in self.env.items()), *self.argv])

    @property
    def environment(self) -> dict[str, str]:
        """All variables that the command runs with."""
        return {**{name: value for name, value in os.environ.items() if not FOREIGN_SETTINGS.fullmatch(name)}, **self.env}

    @property
    def short_line(self) -> str:
        """For readers elsewhere: folders of this machine left out."""
        settings = {
            name: ":".join(Path(part).name for part in value.split(":")) for name, value in self.env.items() if name != "PYTHONPATH"
        }
        words = [Path(word).name if word.startswith("/") else word for word in self.argv]
        return shlex.join([*(f"{name}={value}" for name, value in settings.items()), *words])


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine with its settings. `weights` names their kind: engines of one kind are set against each other."""

    name: str
    weights: str
    ours: bool
    command: Callable[[Job, Path], Command]  # of a job; files are written under the path, which is a prefix of names
    versions: Callable[[], dict[str, str]]


def batchinfer_engines(model: str, concurrency: int) -> list[Engine]:
    """This project, in the Python that runs the script: as it comes, and with the flags of `configs/cpu-fast.toml`."""
    fast = ["--quantization", "int8", "--kv-cache-dtype", "int8"]
    return [
        Engine("batchinfer", "bf16", True, _batchinfer(model, concurrency, []), read_versions),
        Engine("batchinfer", "int8", True, _batchinfer(model, concurrency, fast), read_versions),
    ]


def _batchinfer(model: str, concurrency: int, flags: list[str]) -> Callable[[Job, Path], Command]:
    start, env = [sys.executable, "-m", "batchinfer"], {"PYTHONPATH": str(ROOT)}
    settings = ["--model", model, *flags]

    def command(job: Job, files: Path) -> Command:
        path = str(job.path)
        if job.figure is Figure.FIRST_ANSWER:
            return Command([*start, "run", path, "-o", "-", "--quiet", *settings], env)
        at_once = ["--concurrency", str(concurrency), *settings]
        if job.figure is Figure.TOKENS:
            report = files.with_suffix(".bench.json")
            return Command([*start, "bench", "--workload", path, "--json", str(report), "--quiet", *at_once], env, report)
        output = files.with_suffix(".jsonl")
        report = Path(f"{output}.report.json")
        return Command([*start, "run", path, "-o", str(output), "--overwrite", "--quiet", *at_once], env, report, output)

    return command


def openvino_engine(python: Path, model: Path, concurrency: int) -> Engine:
    """OpenVINO GenAI in its own Python, with a folder that `optimum-cli export openvino` wrote."""

    def command(job: Job, files: Path) -> Command:
        answers = files.with_suffix(".jsonl") if job.figure is Figure.VALID_ANSWERS else None
        argv = [str(python), str(HERE / "run_openvino.py"), str(job.path), str(model), "--max-num-seqs", str(concurrency)]
        return Command([*argv, *_peer_flags(job, answers)], answers=answers)

    packages = ("openvino", "openvino-genai", "openvino-tokenizers")
    return Engine("OpenVINO GenAI", openvino_weights(model), False, command, lambda: package_versions(python, packages))


def openvino_weights(model: Path) -> str:
    """The kind of weights that a folder holds, which the compressor notes in it."""
    file = model / "openvino_model.xml"
    noted = (
        re.search(r'<weight_compression>.*?<mode value="(\w+?)(?:_a?sym)?"', file.read_text(encoding="utf-8"), re.S)
        if file.exists()
        else None
    )
    return noted.group(1) if noted else "as in its folder"


def vllm_engine(python: Path, model: Path, concurrency: int) -> Engine:
    """vLLM CPU in its own Python, bound to all cores that this process may use, with the libraries that its manual says to preload."""
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": core_list(os.sched_getaffinity(0)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "6",
    }
    found = preloads(python)
    if found:
        env["LD_PRELOAD"] = ":".join(map(str, found))

    def command(job: Job, files: Path) -> Command:
        answers = files.with_suffix(".jsonl") if job.figure is Figure.VALID_ANSWERS else None
        length = max(LEAST_MODEL_LEN, job.longest)
        argv = [str(python), str(HERE / "run_vllm.py"), str(job.path), str(model), "--max-num-seqs", str(concurrency)]
        return Command([*argv, "--max-model-len", str(length), *_peer_flags(job, answers)], env, answers=answers)

    packages = ("vllm", "vllm-cpu", "torch", "xgrammar")
    return Engine("vLLM CPU", "bf16", False, command, lambda: package_versions(python, packages))


def _peer_flags(job: Job, answers: Path | None) -> list[str]:
    whole = job.figure in (Figure.FIRST_ANSWER, Figure.WHOLE_JOB)  # what a warm-up takes would count there
    return [*([] if whole else ["--warm-up"]), *(["--answers", str(answers)] if answers else [])]


def core_list(cores: Iterable[int]) -> str:
    """Cores as libnuma reads them: `0-3,8`."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and runs[-1][-1] == core - 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def preloads(python: Path) -> list[Path]:
    """tcmalloc of the system and Intel's OpenMP of vLLM's environment, where they are."""
    folders = [Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64"), Path("/usr/lib"), Path("/usr/local/lib")]
    allocators = [folder / name for folder in folders for name in TCMALLOC if (folder / name).exists()]
    openmp = [path for path in [python.absolute().parent.parent / "lib" / "libiomp5.so"] if path.exists()]
    return [*allocators[:1], *openmp]


def package_versions(python: Path, names: Iterable[str]) -> dict[str, str]:
    """Versions of those packages that a Python has; what went wrong, under `error`, where it cannot be asked."""
    script = (
        "import importlib.metadata as m, json, platform, sys\n"
        "there = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps({'python': platform.python_version(), **{n: there[n] for n in sys.argv[1:] if n in there}}))"
    )
    try:
        command = Command([str(python), "-c", script, *names])
        asked = subprocess.run(command.argv, env=command.environment, capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=True)
        versions: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return {"error": " ".join(str(error).split())}
    return versions
