"""Disturbed jobs: `python -m tests.job.chaos [JOBS [FIRST_SEED]]`. Whatever is done to a job, going on ends with the undisturbed bytes.

Each job is killed, interrupted, starved of disk, damaged or misused up to four times, then left to finish. No row that
stands in the partial file may run again, and no output may stand there before the job is done.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.io.partial import try_decode_line

NUM_ROWS = 60


@dataclass
class Disturbed:
    """One job in a folder of its own, and the dice."""

    folder: Path
    source: Path
    output: Path
    dice: random.Random

    @property
    def partial(self) -> Path:
        return self.output.with_name(self.output.name + ".partial")

    @property
    def manifest(self) -> Path:
        return self.output.with_name(self.output.name + ".manifest.json")

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.job.child", str(self.source), str(self.output), f"--seqs={self.dice.randint(2, 9)}", *flags]
        return subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})

    def end(self, *flags: str) -> tuple[int, str]:
        process = self.start(*flags)
        told = process.communicate(timeout=120)[1].decode()
        assert "Traceback" not in told, told
        return process.returncode, told

    def stored(self) -> set[int]:
        """Rows that stand undamaged in the partial file."""
        if not self.partial.exists():
            return set()
        lines = (try_decode_line(line) for line in self.partial.read_bytes().splitlines(keepends=True))
        return {line.row for line in lines if line is not None}

    def wait_for(self, process: subprocess.Popen[bytes], count: int) -> None:
        deadline = time.monotonic() + 60
        while process.poll() is None and len(self.stored()) < count and time.monotonic() < deadline:
            time.sleep(0.003)

    def run_until(self, signals: list[int]) -> int:
        process = self.start("--step-seconds=0.01")
        self.wait_for(process, len(self.stored()) + self.dice.randint(0, 25))
        time.sleep(self.dice.random() * 0.05)
        for signum in signals:
            process.send_signal(signum)
        told = process.communicate(timeout=60)[1].decode()
        early = "KeyboardInterrupt" in told and "run_job" not in told  # before the job took the signals over
        assert early or "Traceback" not in told, told
        return process.returncode


def kill(job: Disturbed) -> None:
    assert job.run_until([signal.SIGKILL]) in (-signal.SIGKILL, 0, 3)


def interrupt(job: Disturbed) -> None:
    # Before the job installs its handlers a signal ends the process as it ends any other.
    assert job.run_until([signal.SIGINT]) in (130, 0, 3, 1, -signal.SIGINT)


def terminate(job: Disturbed) -> None:
    assert job.run_until([signal.SIGTERM]) in (143, 0, 3, -signal.SIGTERM)


def fill_the_disk(job: Disturbed) -> None:
    size = job.partial.stat().st_size if job.partial.exists() else 0
    code, told = job.end(f"--file-limit={size + job.dice.randint(1500, 4000)}")
    assert code in (0, 1, 3)
    if code == 1:
        assert job.output.name in told


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


def damage_the_manifest(job: Disturbed) -> None:
    if not job.manifest.exists() or not job.stored():
        return
    whole = job.manifest.read_bytes()
    job.manifest.write_bytes(whole[: job.dice.randint(0, len(whole) - 2)])
    code, told = job.end()
    assert code == 2
    assert "--overwrite" in told
    job.manifest.write_bytes(whole)


def change_a_flag(job: Disturbed) -> None:
    if not job.stored() and not job.output.exists():
        return
    before = job.partial.read_bytes() if job.partial.exists() else b""
    code, told = job.end("--max-tokens=9")
    assert code == 2, told
    assert "max_tokens" in told
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


def run_two_at_once(job: Disturbed) -> None:
    first = job.start("--step-seconds=0.02")
    job.wait_for(first, len(job.stored()) + 1)
    running = first.poll() is None
    code, told = job.end()
    if running and first.poll() is None:
        assert code == 2
        assert "another job" in told
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)


HARM: list[Callable[[Disturbed], None]] = [
    kill,
    kill,
    interrupt,
    terminate,
    fill_the_disk,
    tear_the_partial,
    damage_the_partial,
    damage_the_manifest,
    change_a_flag,
    change_the_input,
    run_two_at_once,
]


def write_source(folder: Path, dice: random.Random, kind: str) -> Path:
    rows = [{"id": i, "prompt": f"prompt {dice.randint(0, 9)}", "temperature": dice.choice([0.0, 1.0])} for i in range(NUM_ROWS)]
    source = folder / f"in.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), source, row_group_size=13)
    else:
        lines = [json.dumps(row) for row in rows]
        lines[dice.randrange(NUM_ROWS)] = "not json"
        source.write_text("\n".join(lines) + "\n")
    return source


def disturb(seed: int) -> list[str]:
    """Run one disturbed job to its end; the names of what was done to it."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="batchinfer-chaos-") as name:
        folder = Path(name)
        source = write_source(folder, dice, dice.choice(["jsonl", "parquet"]))
        ending = dice.choice(["jsonl", "parquet"])
        whole = Disturbed(folder, source, folder / f"whole.{ending}", dice)
        assert whole.end()[0] in (0, 3)
        job = Disturbed(folder, source, folder / f"out.{ending}", dice)
        done = []
        for _ in range(dice.randint(1, 4)):
            harm = dice.choice(HARM)
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
            assert ran <= NUM_ROWS - len(stored), f"{ran} rows ran, {len(stored)} were stored"
        left = sorted(path.name for path in folder.iterdir())
        assert left == sorted([source.name, *(f"{stem}.{ending}{end}" for stem in ("out", "whole") for end in ("", ".report.json"))]), left
        return done


def main(jobs: int, first: int) -> int:
    failures = 0
    for seed in range(first, first + jobs):
        try:
            print(f"{seed}: {', '.join(disturb(seed))}", flush=True)
        except AssertionError as error:
            failures += 1
            print(f"{seed}: FAILED {error!r}", flush=True)
    print(f"{jobs} disturbed jobs, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    given = [int(arg) for arg in sys.argv[1:]]
    sys.exit(main(given[0] if given else 300, given[1] if len(given) > 1 else 0))
