"""A thread beside the job: it keeps the job's promises while the main thread is deep inside native code.

Python runs signal handlers in the main thread between two of its own instructions: a kernel that takes ten seconds
holds a signal up for ten seconds. The interpreter writes the number of a signal to a pipe the moment it arrives; this
thread reads it, gives the main thread a little time to end in order, and then ends the process itself. It also pushes
finished rows to the disk every few seconds, and notices a step that never ends.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from batchinfer.job.signals import WATCHED

TICK_SECONDS = 0.25
GRACE_SECONDS = 1.0  # for the main thread to end in order: a job must be gone 2 s after its signal
NEVER = float("inf")


def nothing() -> None:
    """Do nothing."""


class Watchdog:
    """Runs while its block does. `told` is called for a signal that is not obeyed in time, `hung` after `hang_s` without a beat."""

    def __init__(self, told: Callable[[int], None], hung: Callable[[float], None], hang_s: float | None) -> None:
        self.told = told
        self.hung = hung
        self.hang_s = hang_s or NEVER
        self.regularly: Callable[[], None] = nothing  # called with every tick
        self._beats = 0
        self._working = False
        self._ended = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._wakeup_before: int | None = None

    def beat(self) -> None:
        """The job is alive."""
        self._beats += 1

    def working(self, now: bool) -> None:
        """From here on beats are expected, or not."""
        self._beats += 1
        self._working = now

    def __enter__(self) -> Watchdog:
        if threading.current_thread() is threading.main_thread():
            self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended = True
        if self._wakeup_before is not None:
            signal.set_wakeup_fd(self._wakeup_before)
        with suppress(BlockingIOError):  # the pipe is full of signals: the thread has something to read
            os.write(self._writer, b"\0")
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _watch(self) -> None:
        signum, grace, still = 0, GRACE_SECONDS, 0.0
        beats, then = self._beats, time.monotonic()
        while not self._ended:
            for number in self._signals():
                if number in WATCHED:
                    grace = -1.0 if signum else grace  # a second one: at once
                    signum = number
            now = time.monotonic()
            passed, then = min(now - then, 2 * TICK_SECONDS), now  # a process that was stopped for an hour was not stuck
            if self._ended:
                return
            self.regularly()
            if signum:
                grace -= passed
                if grace < 0:
                    self.told(signum)
            still = still + passed if self._working and beats == self._beats else 0.0
            beats = self._beats
            if still >= self.hang_s:
                self.hung(still)
                still = 0.0

    def _signals(self) -> bytes:
        """Numbers of the signals that arrive within a tick."""
        ready, _, _ = select.select([self._reader], [], [], TICK_SECONDS)
        return os.read(self._reader, 64) if ready else b""


def briefly(action: Callable[[], object], seconds: float = 0.2) -> None:
    """Do something that may fail or never end, and do not wait for it long."""

    def attempt() -> None:
        try:
            action()
        except Exception:  # the process ends in a moment, and what could be done was done
            return

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)


def say_last(text: str) -> None:
    """Write to stderr past every buffer and lock."""
    try:
        os.write(2, text.encode("utf-8", "backslashreplace"))
    except OSError:
        return
