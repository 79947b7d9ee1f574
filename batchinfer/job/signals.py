"""SIGINT and SIGTERM: the first ends the job in order, a second one at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

WATCHED = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):  # not an Exception: nothing that retries or isolates errors may hold it up
    """The job was told to end by a signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum


@contextmanager
def interruptible(leave_at_once: Callable[[int], None]) -> Iterator[None]:
    """Raise `Interrupted` at the first signal, call `leave_at_once` at a second one. Only the main thread can do this.

    A signal that was ignored when the process started stays ignored, as Python has it: a shell without job control
    starts what stands before a `&` with SIGINT ignored, so that Ctrl-C in the foreground leaves it alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told = over = False

    def handle(signum: int, _frame: FrameType | None) -> None:
        nonlocal told
        if over:  # the job is done: the process ends anyway
            return
        if told:
            leave_at_once(signum)
        told = True
        raise Interrupted(signum)

    before = {signum: signal.getsignal(signum) for signum in WATCHED}
    taken = [signum for signum in WATCHED if before[signum] is not signal.SIG_IGN]
    for signum in taken:
        signal.signal(signum, handle)
    try:
        yield
    finally:
        over = True
        for signum in taken:
            signal.signal(signum, before[signum] or signal.SIG_DFL)
