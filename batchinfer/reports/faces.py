"""The faces of a running job: a live panel on a terminal (live.py), a plain line every ten seconds elsewhere, or silence."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from batchinfer.core.stats import StepShape, ignore_step
from batchinfer.job import JobInfo, JobSnapshot
from batchinfer.reports.wording import in_short, in_words, kernels_folded

PLAIN_LINE_SECONDS = 10.0
SILENCE_SECONDS = 60.0
SHOWN_CHARACTERS = 1200  # of the first prompt and the first answer


class StallWatch:
    """Says aloud, from a thread of its own, that nothing has moved for a minute: a stuck step sends no ticks."""

    def __init__(self, say: Callable[[str], None], limit_s: float = SILENCE_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self.say = say
        self.limit_s = limit_s
        self.clock = clock
        self._seen: tuple[int, ...] = ()
        self._moved_at = clock()
        self._spoken = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._moved_at = self.clock()
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=2)

    def saw(self, snapshot: JobSnapshot) -> None:
        """Note what a snapshot counts; a change is progress."""
        counts = (snapshot.rows_done, snapshot.rows_read, snapshot.prompt_tokens, snapshot.output_tokens)
        if counts != self._seen:
            self._seen, self._moved_at, self._spoken = counts, self.clock(), 0

    def check(self) -> None:
        """Speak when another minute has passed without progress."""
        still = self.clock() - self._moved_at
        if still >= self.limit_s * (self._spoken + 1):
            self._spoken = int(still / self.limit_s)
            self.say(f"no progress for {in_words(still)}")

    @property
    def still_s(self) -> float:
        """Seconds since anything moved."""
        return self.clock() - self._moved_at

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self.limit_s / 4)):
            self.check()


class QuietFace:
    """Shows nothing but warnings; steps still reach the meter."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream
        self.on_step: Callable[[StepShape], None] = ignore_step

    def __enter__(self) -> QuietFace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Take down whatever stands on the screen."""

    def started(self, info: JobInfo) -> None:
        """The engine stands."""

    def prompt_shown(self, text: str) -> None:
        """The first rendered prompt."""

    def answer_shown(self, row: int, text: str) -> None:
        """The first answer."""

    def tick(self, snapshot: JobSnapshot) -> None:
        """The state of the job."""

    def step(self, shape: StepShape) -> None:
        """Hand an engine step to the meter."""
        self.on_step(shape)

    def note(self, text: str) -> None:
        """A line for people."""

    def warn(self, text: str) -> None:
        """Write a line that nobody asked to be spared."""
        if self.stream is not None:
            self.stream.write(f"warning: {text}\n")
            self.stream.flush()


class PlainFace(QuietFace):
    """Lines of plain text: what was chosen, the first prompt and answer, and one line of progress every ten seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self.lines = stream
        self.clock = clock
        self.watch = StallWatch(self.note, clock=clock)
        self._next_line = float("inf")

    def started(self, info: JobInfo) -> None:
        """Say what is about to run, and start the clock of the progress lines."""
        for line in describe_job(info):
            self.note(line)
        self._next_line = self.clock() + PLAIN_LINE_SECONDS
        self.watch.start()

    def prompt_shown(self, text: str) -> None:
        """Show the first prompt exactly as it is tokenised."""
        self.note(f"first prompt, as the model sees it:\n{indented(text)}")

    def answer_shown(self, row: int, text: str) -> None:
        """Show the first answer."""
        self.note(f"first answer (row {row}):\n{indented(text)}")

    def tick(self, snapshot: JobSnapshot) -> None:
        """Write a line when ten seconds have passed since the last."""
        self.watch.saw(snapshot)
        now = self.clock()
        if now >= self._next_line:
            self._next_line = now + PLAIN_LINE_SECONDS
            self.note(progress_line(snapshot))

    def note(self, text: str) -> None:
        """Write a line."""
        self.lines.write(text + "\n")
        self.lines.flush()

    def close(self) -> None:
        """End the watch."""
        self.watch.stop()


def choose_face(quiet: bool, stream: TextIO | None) -> QuietFace:
    """The face for a stream: silence when asked for or when there is nowhere to write."""
    if quiet or stream is None:
        return QuietFace(stream)
    if not stream.isatty():  # whatever FORCE_COLOR says: a log gets no control codes
        return PlainFace(stream)
    from rich.console import Console

    from batchinfer.reports.live import LiveFace

    console = Console(file=stream, highlight=False)
    return PlainFace(stream) if console.is_dumb_terminal else LiveFace(console)


def describe_job(info: JobInfo) -> list[str]:
    """Lines that say what is about to run and what was chosen."""
    rows = "" if info.num_rows is None else f" ({info.num_rows:,} rows)"
    lines = [f"{info.input}{rows} -> {'stdout' if info.output == '-' else info.output}, model {info.model}"]
    lines += kernels_folded(info.choices)
    if info.rows_done_before:
        lines.append(f"{info.rows_done_before:,} rows were done by an earlier run and are kept")
    lines.append(info.treatment)
    if info.parameter_columns:
        lines.append(f"sampling parameters from columns: {', '.join(info.parameter_columns)} (--no-row-params leaves them alone)")
    d = info.defaults
    stops = f", stop {list(d.stop)}" if d.stop else ""
    lines.append(
        f"sampling, unless a row says otherwise: temperature {d.temperature:g}, top_p {d.top_p:g}, top_k {d.top_k}, "
        f"min_p {d.min_p:g}, max_tokens {d.max_tokens}{stops}"
    )
    return lines


def progress_line(s: JobSnapshot) -> str:
    """The state of a job in one line."""
    total = f"/{s.num_rows:,}" if s.num_rows is not None else ""
    left = f", {time_left(s)}" if time_left(s) else ""
    return (
        f"[{in_short(s.elapsed_s)}] rows {s.rows_done:,}{total} done, {s.rows_failed:,} failed, {s.running:,} running, {s.waiting:,} waiting; "
        f"tokens/s {s.input_tokens_per_s:,.0f} in, {s.output_tokens_per_s:,.0f} out; KV pool {pool_share(s):.0%}; "
        f"prefix hits {s.prefix_hit_rate:.0%}; {s.preemptions:,} preemptions{left}"
    )


def time_left(s: JobSnapshot) -> str:
    """The estimate in words; nothing where there is none, or where the last rows outlive it."""
    return "" if s.eta_s is None or s.eta_s < 1 else f"{in_words(s.eta_s)} left"


def pool_share(s: JobSnapshot) -> float:
    """Share of the KV pool that running rows hold."""
    return s.blocks_used / s.blocks_total if s.blocks_total else 0.0


def shown(text: str) -> str:
    """The beginning of a text, safe to show: control characters in a prompt or an answer cannot act on the terminal."""
    left_out = len(text) - SHOWN_CHARACTERS
    safe = "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text[:SHOWN_CHARACTERS])
    return f"{safe}... ({left_out:,} more characters)" if left_out > 0 else safe


def indented(text: str) -> str:
    """The text with a margin, so that it stands apart in a log."""
    return "\n".join("    " + line for line in shown(text).split("\n"))
