"""Jobs in processes of their own, really killed, interrupted, piped away and run out of disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchinfer.job.signals import Interrupted
from tests.job.world import World, leftovers, read_jsonl, write_jsonl

STARTED: list[subprocess.Popen[bytes]] = []  # of the test that runs: tests/job/conftest.py ends what it leaves behind
ROWS = [{"id": i, "prompt": f"prompt {i}"} for i in range(120)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", ROWS)


@pytest.fixture
def whole(tmp_path: Path, source: Path) -> bytes:
    World().run(source, tmp_path / "whole.jsonl", {"max_tokens": 5}, chat=False)
    return (tmp_path / "whole.jsonl").read_bytes()


def start(*args: object, **options: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.job.child", *map(str, args)]
    options = {"env": os.environ | {"OMP_NUM_THREADS": "1"}, **options}
    process: subprocess.Popen[bytes] = subprocess.Popen(command, stderr=subprocess.PIPE, **options)  # type: ignore[call-overload]
    STARTED.append(process)
    return process


def finished_rows(output: Path) -> int:
    try:
        return output.with_name(output.name + ".partial").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def wait_for_rows(process: subprocess.Popen[bytes], output: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while finished_rows(output) < count:
        assert process.poll() is None, process.stderr.read()  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_killed_three_times(tmp_path: Path, source: Path, whole: bytes) -> None:
    output = tmp_path / "out.jsonl"
    for rows in (10, 40, 70):
        process = start(source, output, "--step-seconds=0.02")
        wait_for_rows(process, output, rows)
        process.kill()
        process.wait()
        assert not output.exists()
    before = finished_rows(output)
    process = start(source, output)
    assert process.wait(60) == 0
    assert output.read_bytes() == whole
    assert before >= 70
    assert leftovers(output) == []


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(tmp_path: Path, source: Path, whole: bytes, signum: int, code: int) -> None:
    output = tmp_path / "out.jsonl"
    process = start(source, output, "--step-seconds=0.02")
    wait_for_rows(process, output, 20)
    process.send_signal(signum)
    _, told = process.communicate(timeout=10)
    assert process.returncode == code
    assert b"run the same command again" in told
    assert b"Traceback" not in told
    assert leftovers(output) == ["out.jsonl.manifest.json", "out.jsonl.partial"]
    assert start(source, output).wait(60) == 0
    assert output.read_bytes() == whole


def test_a_full_disk_keeps_what_is_finished(tmp_path: Path, source: Path, whole: bytes) -> None:
    output = tmp_path / "out.jsonl"
    process = start(source, output, "--file-limit=9000")
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"out.jsonl" in told
    assert b"Traceback" not in told
    assert not output.exists()
    assert 0 < finished_rows(output) < 120
    assert start(source, output).wait(60) == 0
    assert output.read_bytes() == whole


def test_stdout_streams_in_order(tmp_path: Path, source: Path, whole: bytes) -> None:
    process = start(source, "-", stdout=subprocess.PIPE)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "whole.jsonl", "whole.jsonl.report.json"]


def test_a_reader_that_goes_away(source: Path) -> None:
    process = start(source, "-", "--step-seconds=0.01", stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    told = process.stderr.read()
    assert process.wait(30) == 141
    assert b"Traceback" not in told


def test_a_device_that_is_full(source: Path) -> None:
    process = start(source, "/dev/full")
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"/dev/full: No space left" in told


def test_stdin_slowly(tmp_path: Path, source: Path, whole: bytes) -> None:
    output = tmp_path / "out.jsonl"
    process = start("-", output, stdin=subprocess.PIPE)
    assert process.stdin is not None
    data = source.read_bytes()
    for at in range(0, len(data), 1000):
        process.stdin.write(data[at : at + 1000])
        process.stdin.flush()
        time.sleep(0.01)
    process.stdin.close()
    assert process.wait(60) == 0
    assert output.read_bytes() == whole
    assert leftovers(output) == []


def test_stdin_goes_on_after_a_kill(tmp_path: Path, source: Path, whole: bytes) -> None:
    output = tmp_path / "out.jsonl"
    with source.open("rb") as file:
        process = start("-", output, "--step-seconds=0.02", stdin=file)
        wait_for_rows(process, output, 30)
        process.kill()
        process.wait()
    with source.open("rb") as file:
        process = start("-", output, stdin=file)
        assert process.wait(60) == 0
    assert output.read_bytes() == whole
    with source.open("rb") as file:
        process = start("-", output, stdin=file)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"complete" in told
    assert len(read_jsonl(output)) == 120


def processes_of(group: int) -> list[str]:
    """What still runs in the process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(stat.parent.name)
    return found


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_in_native_code(tmp_path: Path, source: Path, whole: bytes, signum: int, code: int) -> None:
    output = tmp_path / "out.jsonl"
    process = start(source, output, "--stuck-after=12", start_new_session=True)
    wait_for_rows(process, output, 8)
    time.sleep(0.3)
    process.send_signal(signum)
    _, told = process.communicate(timeout=10)
    assert process.returncode == code
    assert b"run the same command again" in told
    assert b"Traceback" not in told
    assert leftovers(output) == ["out.jsonl.manifest.json", "out.jsonl.partial"]
    assert processes_of(process.pid) == []
    assert start(source, output).wait(60) == 0
    assert output.read_bytes() == whole


def test_a_second_signal_ends_native_code_at_once(tmp_path: Path, source: Path) -> None:
    output = tmp_path / "out.jsonl"
    process = start(source, output, "--stuck-after=0")
    wait_for = output.with_name("out.jsonl.partial")
    while not wait_for.exists():
        time.sleep(0.01)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=10)
    assert process.returncode in (130, 143)
    assert b"Traceback" not in told
    assert leftovers(output) == []  # nothing was finished


def test_a_streamed_job_in_native_code_leaves_no_folder(tmp_path: Path, source: Path) -> None:
    process = start(source, "-", "--stuck-after=12", stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert process.stdout is not None
    assert process.stdout.readline()
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143
    process.stdout.close()
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_hang_ends_the_job(tmp_path: Path, source: Path, whole: bytes) -> None:
    output = tmp_path / "out.jsonl"
    process = start(source, output, "--stuck-after=12", "--hang-s=1")
    _, told = process.communicate(timeout=30)
    assert process.returncode == 1
    assert b"no engine step for 1 s" in told
    assert b"run the same command again" in told
    assert leftovers(output) == ["out.jsonl.manifest.json", "out.jsonl.partial"]
    assert start(source, output, "--hang-s=5").wait(60) == 0
    assert output.read_bytes() == whole


def test_a_reader_that_takes_its_time_is_no_hang(source: Path, whole: bytes) -> None:
    process = start(source, "-", "--hang-s=0.5", stdout=subprocess.PIPE, pipesize=4096)
    assert process.stdout is not None
    time.sleep(2.5)
    assert process.poll() is None
    assert process.stdout.read() == whole
    assert process.wait(30) == 0


def test_an_ignored_signal_stays_ignored(tmp_path: Path, source: Path, whole: bytes) -> None:
    """A shell without job control starts what stands before a `&` with SIGINT ignored."""
    output = tmp_path / "out.jsonl"
    process = start(source, output, "--step-seconds=0.01", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    wait_for_rows(process, output, 20)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert output.read_bytes() == whole


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_engine_that_breaks_while_it_unwinds_hides_no_signal(tmp_path: Path, signum: signal.Signals) -> None:
    """The signal comes at an arbitrary line, so that dropping the unfinished rows may fail."""

    class Torn(World):
        def step(self, shape: object) -> None:
            if self.stop_after == 0:
                self.engine.memory.release = None
            super().step(shape)

    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"prompt {i}"} for i in range(24)])
    report = Torn(stop_after=12, error=Interrupted(signum)).run(source, tmp_path / "out.jsonl")
    assert report.exit_code == 128 + signum
    assert (report.num_rows, report.rows_total) == (24, len((tmp_path / "out.jsonl.partial").read_bytes().splitlines()))
    assert report.seconds.run > 0


@pytest.mark.parametrize(("arguments", "number", "named"), [(("IN", "-"), 1, b"stdout is closed"), (("-", "OUT"), 0, b"stdin is closed")])
def test_streams_that_are_closed(tmp_path: Path, source: Path, arguments: tuple[str, str], number: int, named: bytes) -> None:
    """Whatever file comes to have the stream's number is not written to or read from."""
    places = {"IN": str(source), "OUT": str(tmp_path / "out.jsonl")}
    process = start(*(places.get(name, name) for name in arguments), preexec_fn=lambda: os.close(number))
    _, told = process.communicate(timeout=60)
    assert process.returncode not in (0, 3)
    assert named in told
    assert leftovers(tmp_path / "out.jsonl") == []
