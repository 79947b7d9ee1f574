"""What a person sees while something is measured: a status line on a terminal, plain lines every ten seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.status import Status
from rich.text import Text

PLAIN_LINE_SECONDS = 10.0


class MeasuringFace:
    """Says lines, and keeps one line of progress. With `quiet` it says warnings alone."""

    def __init__(self, quiet: bool, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._quiet = quiet
        self._stream = stream
        self._clock = clock
        self._next_at = clock() + PLAIN_LINE_SECONDS
        terminal = not quiet and stream.isatty()
        self._console = Console(file=stream, highlight=False) if terminal else None
        self._status: Status | None = None

    def __enter__(self) -> MeasuringFace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._quiet:
            return
        self._write(line)

    def warn(self, line: str) -> None:
        """A line that nobody asked to be spared."""
        self._write(f"warning: {line}")

    def progress(self, line: str) -> None:
        """Where the work stands now; may be called after every step."""
        if self._quiet:
            return
        if self._console is not None:
            if self._status is None:
                self._status = self._console.status(Text(line))
                self._status.start()
            self._status.update(Text(line))
        elif self._clock() >= self._next_at:
            self._next_at = self._clock() + PLAIN_LINE_SECONDS
            self._write(line)

    def close(self) -> None:
        """Take the line of progress down."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _write(self, line: str) -> None:
        if self._console is not None:
            self._console.print(Text(line), soft_wrap=True)
        else:
            self._stream.write(line + "\n")
            self._stream.flush()
