"""SIGINT and SIGTERM: the first ends the job in order, a second one at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

WATCHED = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):  # not an Exception: nothing that retries or isolates errors may hold it up
    """The job was told to end by a signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted` at the first signal; a second one ends the process. Only the main thread can do this."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told = False

    def handle(signum: int, _frame: FrameType | None) -> None:
        nonlocal told
        if told:
            os._exit(128 + signum)
        told = True
        raise Interrupted(signum)

    before = {signum: signal.signal(signum, handle) for signum in WATCHED}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
