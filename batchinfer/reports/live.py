"""The face of a job on a terminal: a panel of numbers at its foot, and lines above it."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from batchinfer.job import JobInfo, JobSnapshot
from batchinfer.reports.faces import SILENCE_SECONDS, QuietFace, StallWatch, describe_job, pool_share, progress_line, shown, time_left
from batchinfer.reports.wording import fitting, in_short, in_words

REFRESHES_PER_SECOND = 4


class LiveFace(QuietFace):
    """One live panel at the foot of the terminal; lines go above it."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self.watch = StallWatch(self.note)
        self.info: JobInfo | None = None
        self.snapshot: JobSnapshot | None = None
        self.answered = False
        self.live = Live(
            console=console, get_renderable=self._picture, refresh_per_second=REFRESHES_PER_SECOND, transient=True, redirect_stdout=False
        )

    def started(self, info: JobInfo) -> None:
        """Say what is about to run and begin to draw."""
        self.info = info
        for line in describe_job(info):
            self.note(line)
        self.watch.start()
        self.live.start()

    def prompt_shown(self, text: str) -> None:
        """Show the first prompt exactly as it is tokenised."""
        self._show("first prompt, as the model sees it", text)

    def answer_shown(self, row: int, text: str) -> None:
        """Show the first answer; the panel of numbers follows it."""
        self._show(f"first answer (row {row})", text)
        self.answered = True

    def tick(self, snapshot: JobSnapshot) -> None:
        """Keep the numbers for the next drawing."""
        self.watch.saw(snapshot)
        self.snapshot = snapshot

    def note(self, text: str) -> None:
        """Write a line above the panel."""
        self.console.print(Text(text))

    def warn(self, text: str) -> None:
        """Write a warning above the panel."""
        self.console.print(Text(f"warning: {text}", style="yellow"))

    def close(self) -> None:
        """Take the panel down."""
        if self.live.is_started:
            self.live.stop()
        self.watch.stop()

    def _show(self, title: str, text: str) -> None:
        self.console.print(Panel(Text(shown(text)), title=title, title_align="left", border_style="dim"))

    def _picture(self) -> RenderableType:
        """What stands at the foot, and an empty line under it: what a terminal echoes there, such as ^C, moves nothing."""
        return Group(self._now(), Text())

    def _now(self) -> RenderableType:
        if self.snapshot is None:
            return Text("the first step is running", style="dim")
        if not self.answered:
            return Text(fitting(f"the first answer is on its way: {progress_line(self.snapshot)}", self.console.width), style="dim")
        title = f"batchinfer  {self.info.model}" if self.info is not None else "batchinfer"
        return progress_panel(self.snapshot, title, self.watch.still_s)


def progress_panel(s: JobSnapshot, title: str, still_s: float = 0.0) -> Panel:
    """The state of a job as a panel of four lines that fits 80 columns."""
    share = min(1.0, s.rows_done / s.num_rows) if s.num_rows else s.fraction_read
    head = Table.grid(expand=True, padding=(0, 1))
    head.add_column(ratio=1)
    head.add_column(justify="right", no_wrap=True)
    head.add_row(ProgressBar(total=1.0, completed=share), f"{share:.0%}  {time_left(s)}")
    body = Table.grid(padding=(0, 3))
    body.add_column(style="dim", no_wrap=True)
    for _ in range(4):
        body.add_column(no_wrap=True)
    total = f" of {s.num_rows:,}" if s.num_rows is not None else ""
    failed = Text(f"{s.rows_failed:,} failed", style="red" if s.rows_failed else "")
    body.add_row("rows", f"{s.rows_done:,}{total} done", failed, f"{s.running:,} running", f"{s.waiting:,} waiting")
    body.add_row(
        "tokens",
        f"{s.input_tokens_per_s:,.0f}/s in",
        f"{s.output_tokens_per_s:,.0f}/s out",
        f"{s.prompt_tokens:,} in",
        f"{s.output_tokens:,} out",
    )
    body.add_row(
        "KV pool",
        f"{pool_share(s):.0%} used",
        f"{s.prefix_hit_rate:.0%} prefix hits",
        f"{s.preemptions:,} preemptions",
        in_short(s.elapsed_s),
    )
    lines: list[RenderableType] = [head, body]
    if still_s >= SILENCE_SECONDS:
        lines.append(Text(f"no progress for {in_words(still_s)}", style="bold red"))
    return Panel(Group(*lines), title=title, title_align="left", border_style="cyan")
