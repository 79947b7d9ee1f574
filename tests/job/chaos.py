"""Disturbed jobs: `python -m tests.job.chaos [JOBS [FIRST_SEED]]`. Whatever is done to a job, going on ends with the undisturbed bytes.

Each job is killed, interrupted, starved of disk, damaged or misused up to four times, then left to finish. No row that
stands in the partial file may run again, and no output may stand there before the job is done. Most jobs run a fake
model, every seventh a tiny one in float32, every thirtieth the default one in bf16 where it is to be had. As root the
disk is a small one of its own, which can really be full and really be read-only.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.io.partial import try_decode_line

TINY_EVERY, DEFAULT_EVERY = 7, 30
DISK_BYTES = 4 << 20


@dataclass(frozen=True)
class Model:
    """What a job computes with, and how many rows that allows."""

    name: str
    flags: tuple[str, ...] = ()
    num_rows: int = 60


FAKE = Model("fake")


@dataclass
class Disturbed:
    """One job in a folder of its own, and the dice."""

    folder: Path
    source: Path
    output: Path
    dice: random.Random
    model: Model = FAKE
    own_disk: bool = False

    @property
    def partial(self) -> Path:
        return self.output.with_name(self.output.name + ".partial")

    @property
    def manifest(self) -> Path:
        return self.output.with_name(self.output.name + ".manifest.json")

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.job.child", str(self.source), str(self.output), f"--seqs={self.dice.randint(2, 9)}"]
        return subprocess.Popen([*command, *self.model.flags, *flags], stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})

    def end(self, *flags: str) -> tuple[int, str]:
        process = self.start(*flags)
        told = process.communicate(timeout=300)[1].decode()
        assert "Traceback" not in told, told
        return process.returncode, told

    def stored(self) -> set[int]:
        """Rows that stand undamaged in the partial file."""
        if not self.partial.exists():
            return set()
        lines = (try_decode_line(line) for line in self.partial.read_bytes().splitlines(keepends=True))
        return {line.row for line in lines if line is not None}

    def wait_for(self, process: subprocess.Popen[bytes], count: int) -> None:
        deadline = time.monotonic() + 120
        while process.poll() is None and len(self.stored()) < count and time.monotonic() < deadline:
            time.sleep(0.003)

    def run_until(self, signals: list[int]) -> int:
        process = self.start("--step-seconds=0.01")
        if self.dice.random() < 0.2:  # while it starts or loads
            time.sleep(self.dice.random() * 1.5)
        else:
            self.wait_for(process, len(self.stored()) + self.dice.randint(0, 25))
            time.sleep(self.dice.random() * 0.05)
        for signum in signals:
            process.send_signal(signum)
        told = process.communicate(timeout=60)[1].decode()
        early = "KeyboardInterrupt" in told and "in run_job" not in told  # before the job took the signals over
        assert early or "Traceback" not in told, told
        return process.returncode


def check_code(code: int, *allowed: int) -> None:
    assert code in (0, 3, *allowed), f"exit code {code}"


def kill(job: Disturbed) -> None:
    check_code(job.run_until([signal.SIGKILL]), -signal.SIGKILL)


def interrupt(job: Disturbed) -> None:
    # Before the job installs its handlers a signal ends the process as it ends any other.
    check_code(job.run_until([signal.SIGINT]), 130, 1, -signal.SIGINT)


def interrupt_twice(job: Disturbed) -> None:
    check_code(job.run_until([signal.SIGINT, signal.SIGINT]), 130, 1, -signal.SIGINT)


def terminate(job: Disturbed) -> None:
    check_code(job.run_until([signal.SIGTERM]), 143, -signal.SIGTERM)


def limit_file_sizes(job: Disturbed) -> None:
    size = job.partial.stat().st_size if job.partial.exists() else 0
    code, told = job.end(f"--file-limit={size + job.dice.randint(1500, 4000)}")
    assert code in (0, 1, 3)
    if code == 1:
        assert job.output.name in told


def fill_the_disk(job: Disturbed) -> None:
    if not job.own_disk:
        return limit_file_sizes(job)
    ballast = job.folder / "ballast"
    free = shutil.disk_usage(job.folder).free
    ballast.write_bytes(bytes(max(0, free - 4096 * job.dice.randint(0, 24))))
    code, told = job.end()
    assert code in (0, 1, 3), told
    if code == 1:
        assert "space" in told.lower(), told
    ballast.unlink()
    return None


def lock_the_folder(job: Disturbed) -> None:
    """No file may be made or changed for a while."""
    if not job.own_disk and os.geteuid() == 0:
        return  # nothing is locked for root
    before = {path.name: path.read_bytes() for path in job.folder.iterdir()}
    lock, unlock = (("mount", "-o", "remount,ro"), ("mount", "-o", "remount,rw")) if job.own_disk else (("chmod", "555"), ("chmod", "755"))
    subprocess.run([*lock, str(job.folder)], check=True)
    try:
        code, told = job.end()
    finally:
        subprocess.run([*unlock, str(job.folder)], check=True)
    assert code == 1, told
    assert "cannot be written" in told, told
    assert {path.name: path.read_bytes() for path in job.folder.iterdir()} == before


def tear_the_partial(job: Disturbed) -> None:
    if job.partial.exists():
        data = job.partial.read_bytes()
        job.partial.write_bytes(data[: job.dice.randint(0, len(data))])


def damage_the_partial(job: Disturbed) -> None:
    if job.partial.exists() and job.partial.stat().st_size:
        data = bytearray(job.partial.read_bytes())
        for _ in range(job.dice.randint(1, 3)):
            data[job.dice.randrange(len(data))] ^= 1 << job.dice.randrange(8)
        job.partial.write_bytes(bytes(data))


def tear_the_manifest(job: Disturbed) -> None:
    if not job.manifest.exists() or not job.stored():
        return
    whole = job.manifest.read_bytes()
    job.manifest.write_bytes(whole[: job.dice.randint(0, len(whole) - 2)])
    code, told = job.end()
    assert code == 2
    assert "--overwrite" in told
    job.manifest.write_bytes(whole)


def damage_the_manifest(job: Disturbed) -> None:
    if not job.manifest.exists() or not job.stored():
        return
    whole = job.manifest.read_bytes()
    data = bytearray(whole)
    data[job.dice.randrange(len(data))] ^= 1 << job.dice.randrange(8)
    job.manifest.write_bytes(bytes(data))
    code, told = job.end()  # what the bit said decides: refused, or nothing that changes text
    assert code in (0, 2, 3), told
    if code == 2:
        job.manifest.write_bytes(whole)


def change_a_flag(job: Disturbed) -> None:
    if not job.stored() and not job.output.exists():
        return
    before = job.partial.read_bytes() if job.partial.exists() else b""
    code, told = job.end("--max-tokens=9")
    assert code == 2, told
    assert "--max-tokens" in told
    assert (job.partial.read_bytes() if job.partial.exists() else b"") == before


def change_the_input(job: Disturbed) -> None:
    if not job.stored():
        return
    facts = job.source.stat()
    whole = job.source.read_bytes()
    job.source.write_bytes(whole + whole[-1:])
    code, _ = job.end()
    assert code == 2
    job.source.write_bytes(whole)
    os.utime(job.source, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def change_a_row_in_secret(job: Disturbed) -> None:
    """Size and time stay: only the row itself can tell."""
    stored = job.stored()
    if not stored or job.source.suffix != ".jsonl" or len(stored) == job.model.num_rows:
        return
    facts = job.source.stat()
    whole = job.source.read_bytes()
    lines = whole.splitlines(keepends=True)
    chosen = job.dice.choice(sorted(stored))
    lines[chosen] = lines[chosen].replace(b"o", b"0", 1)
    job.source.write_bytes(b"".join(lines))
    os.utime(job.source, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    code, told = job.end()
    assert code == 2, told
    assert f"line {chosen + 1} is not what it was" in told, told
    job.source.write_bytes(whole)
    os.utime(job.source, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def run_two_at_once(job: Disturbed) -> None:
    first = job.start("--step-seconds=0.02")
    job.wait_for(first, len(job.stored()) + 1)
    code, told = job.end()
    if first.poll() is None and not job.output.exists():  # else the first may have been done before the second looked
        assert code == 2, told
        assert "another job" in told, told
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)


HARM = [
    kill,
    kill,
    interrupt,
    interrupt_twice,
    terminate,
    limit_file_sizes,
    fill_the_disk,
    lock_the_folder,
    tear_the_partial,
    damage_the_partial,
    tear_the_manifest,
    damage_the_manifest,
    change_a_flag,
    change_the_input,
    change_a_row_in_secret,
    run_two_at_once,
]
BEGINNINGS = [kill, interrupt, interrupt_twice, terminate, limit_file_sizes, run_two_at_once]  # leave something to harm


def write_source(folder: Path, dice: random.Random, kind: str, num_rows: int) -> Path:
    rows = [{"id": i, "prompt": f"prompt {dice.randint(0, 9)}", "temperature": dice.choice([0.0, 1.0])} for i in range(num_rows)]
    source = folder / f"in.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), source, row_group_size=13)
    else:
        lines = [json.dumps(row) for row in rows]
        lines[dice.randrange(num_rows)] = "not json"
        source.write_text("\n".join(lines) + "\n")
    return source


@contextmanager
def work_folder() -> Iterator[tuple[Path, bool]]:
    """A folder, and whether it is a small disk of its own."""
    with tempfile.TemporaryDirectory(prefix="batchinfer-chaos-") as name:
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", name]
        mounted = (
            os.geteuid() == 0 and shutil.which("mount") is not None and subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
        )
        try:
            yield Path(name), mounted
        finally:
            if mounted:
                subprocess.run(["umount", "-l", name], check=True)


def disturb(seed: int, model: Model = FAKE, most: int = 4) -> list[str]:
    """Run one disturbed job to its end; the names of what was done to it."""
    dice = random.Random(seed)
    with work_folder() as (folder, own_disk):
        source = write_source(folder, dice, dice.choice(["jsonl", "parquet"]), model.num_rows)
        ending = dice.choice(["jsonl", "parquet"])
        whole = Disturbed(folder, source, folder / f"whole.{ending}", dice, model)
        assert whole.end()[0] in (0, 3)
        job = Disturbed(folder, source, folder / f"out.{ending}", dice, model, own_disk)
        done = []
        for turn in range(dice.randint(1, most)):
            harm = dice.choice(BEGINNINGS if turn == 0 else HARM)
            done.append(harm.__name__)
            harm(job)
            if job.output.exists():
                break
        stored = job.stored()
        finished = job.output.exists() and not job.partial.exists()
        code, told = job.end()
        assert code in (0, 3), told
        assert job.output.read_bytes() == whole.output.read_bytes(), "the bytes differ"
        if not finished:
            ran = int(told.rsplit("ran ", 1)[1])
            assert ran <= model.num_rows - len(stored), f"{ran} rows ran, {len(stored)} were stored"
        left = sorted(path.name for path in folder.iterdir())
        assert left == sorted([source.name, *(f"{stem}.{ending}{end}" for stem in ("out", "whole") for end in ("", ".report.json"))]), left
        return done


def models(folder: Path) -> dict[str, Model]:
    """The real models that are to be had."""
    from batchinfer.errors import BatchInferError
    from batchinfer.weights.source import resolve_model
    from tests.oracle.tiny_models import write_tiny

    path = str(write_tiny(folder / "tiny", "llama3.2"))
    found = {"tiny": Model("tiny", (f"--model={path}", "--dtype=float32"), 40)}
    try:
        found["default"] = Model("default", (f"--model={resolve_model('smollm2-135m').path}", "--dtype=bf16"), 20)
    except BatchInferError as error:
        print(f"without the default model: {error}")
    return found


def main(jobs: int, first: int) -> int:
    failures = 0
    harms: Counter[str] = Counter()
    by_model: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        known = models(Path(folder))
        for seed in range(first, first + jobs):
            model = FAKE
            if seed % TINY_EVERY == 0:
                model = known["tiny"]
            if seed % DEFAULT_EVERY == 1:
                model = known.get("default", FAKE)
            try:
                done = disturb(seed, model)
            except AssertionError as error:
                failures += 1
                where = traceback.extract_tb(error.__traceback__)[-1]
                print(f"{seed} ({model.name}): FAILED in {where.name}, `{where.line}`: {error}", flush=True)
                continue
            harms.update(done)
            by_model[model.name] += 1
            print(f"{seed} ({model.name}): {', '.join(done)}", flush=True)
    print(", ".join(f"{name} {count}" for name, count in harms.most_common()))
    print(f"{jobs} disturbed jobs ({', '.join(f'{name} {count}' for name, count in by_model.items())}), {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    given = [int(arg) for arg in sys.argv[1:]]
    sys.exit(main(given[0] if given else 300, given[1] if len(given) > 1 else 0))
