"""The faces of a running job: what is shown, when, and that nothing odd reaches a terminal."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from batchinfer.core.request import SamplingParams
from batchinfer.job import JobInfo, JobSnapshot
from batchinfer.reports.faces import PlainFace, QuietFace, StallWatch, choose_face, shown
from batchinfer.reports.live import LiveFace, progress_panel
from batchinfer.reports.wording import fitting, in_bytes, in_short, in_words, kernels_folded, plural

INFO = JobInfo(
    model="m", input="in.jsonl", output="out.jsonl", shape="plain", num_rows=40, rows_done_before=3,
    treatment="prompts: sent raw", parameter_columns=("seed",), defaults=SamplingParams(stop=("x",)), choices=("dtype: float32 (asked for)",),
    max_num_seqs=4, max_model_len=512, pool_tokens=1024,
)  # fmt: skip
SNAPSHOT = JobSnapshot(
    rows_done=12, rows_failed=1, rows_read=20, num_rows=40, running=4, waiting=4, prompt_tokens=1234567, output_tokens=7654321, blocks_used=50,
    blocks_total=100, prefix_hit_rate=0.25, preemptions=2, elapsed_s=83.0, fraction_read=0.5, eta_s=200.0, input_tokens_per_s=1234.5, output_tokens_per_s=345.6,
)  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_come_every_ten_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    with PlainFace(stream, clock) as face:
        face.started(INFO)
        before = len(stream.getvalue().splitlines())
        for tenth in range(251):
            clock.now = tenth / 10
            face.tick(replace(SNAPSHOT, rows_done=tenth))
        lines = stream.getvalue().splitlines()[before:]
    assert len(lines) == 2
    assert lines[0].startswith("[1:23] rows 100/40 done, 1 failed, 4 running, 4 waiting; tokens/s 1,234 in, 346 out; KV pool 50%")
    assert lines[0].endswith("2 preemptions, 3 min 20 s left")


def test_what_was_chosen_is_said_first() -> None:
    stream = io.StringIO()
    with PlainFace(stream) as face:
        face.started(INFO)
        face.prompt_shown("<|user|>hello\n")
        face.answer_shown(7, "good day")
    text = stream.getvalue()
    for words in (
        "in.jsonl (40 rows) -> out.jsonl",
        "dtype: float32",
        "3 rows were done",
        "columns: seed",
        "stop ['x']",
        "    <|user|>hello",
        "row 7",
    ):
        assert words in text


def test_a_minute_without_progress_is_said_once_a_minute() -> None:
    said: list[str] = []
    clock = Clock()
    watch = StallWatch(said.append, clock=clock)
    for second in range(200):
        clock.now = second
        if second < 10:
            watch.saw(replace(SNAPSHOT, output_tokens=second))
        watch.check()
    assert said == ["no progress for 1 min 0 s", "no progress for 2 min 0 s", "no progress for 3 min 0 s"]
    watch.saw(replace(SNAPSHOT, output_tokens=11))
    watch.check()
    assert len(said) == 3


def test_the_stall_watch_speaks_from_its_own_thread() -> None:
    import threading

    spoke = threading.Event()
    watch = StallWatch(lambda line: spoke.set(), limit_s=0.05)
    watch.start()
    assert spoke.wait(5)
    watch.stop()


@pytest.mark.parametrize("width", [80, 160])
def test_the_panel_fits_the_terminal(width: int) -> None:
    stream = io.StringIO()
    Console(file=stream, width=width, force_terminal=True, color_system=None).print(progress_panel(SNAPSHOT, "batchinfer  m"))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 6
    assert all(len(line) == width for line in lines)
    text = stream.getvalue()
    for words in (
        "12 of 40 done",
        "1 failed",
        "4 running",
        "1,234/s in",
        "346/s out",
        "50% used",
        "25% prefix hits",
        "2 preemptions",
        "3 min 20 s left",
    ):
        assert words in text


def test_the_panel_says_that_nothing_moves() -> None:
    stream = io.StringIO()
    Console(file=stream, width=80).print(progress_panel(SNAPSHOT, "b", still_s=75))
    assert "no progress for 1 min 15 s" in stream.getvalue()


def test_the_panel_follows_prompt_and_answer() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, color_system=None)
    with LiveFace(console) as face:
        face.started(INFO)
        face.prompt_shown("first [bold]prompt[/bold]")
        face.tick(SNAPSHOT)
        console.print(face._picture())
        before = stream.getvalue()
        face.answer_shown(0, "an answer")
        console.print(face._picture())
    assert "first answer is on its way" in before
    assert "prefix hits" not in re.sub(r"prefix hits \d+%;", "", before)
    assert "first [bold]prompt[/bold]" in before
    assert "25% prefix hits" in stream.getvalue()[len(before) :]


def test_text_cannot_act_on_the_terminal() -> None:
    assert shown("a\x1b[2Jb\x07\nc\td\r") == "a\\x1b[2Jb\\x07\nc\td\\r"
    assert shown("x" * 5000).endswith("... (3,800 more characters)")


def test_the_face_is_chosen_by_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert type(choose_face(False, io.StringIO())) is PlainFace
    assert type(choose_face(True, io.StringIO())) is QuietFace
    assert type(choose_face(False, None)) is QuietFace


def test_numbers_as_people_say_them() -> None:
    assert [in_words(s) for s in (0.83, 9.96, 42.4, 200, 7500)] == ["0.8 s", "10 s", "42 s", "3 min 20 s", "2 h 5 min"]
    assert [in_short(s) for s in (7, 750, 3750)] == ["0:07", "12:30", "1:02:30"]
    assert [in_bytes(n) for n in (512, 1536, 3 * 2**30, 5 * 2**40)] == ["512 B", "1.5 KiB", "3.0 GiB", "5.0 TiB"]
    assert (fitting("abcdef", 4), fitting("abc", 4)) == ("abc…", "abc")
    assert [plural(1, "row"), plural(2000, "row"), plural(2, "entry", "entries")] == ["1 row", "2,000 rows", "2 entries"]


def test_kernels_are_folded_into_one_line() -> None:
    built = "built with c++ for AVX-512 (VNNI, BF16)"
    choices = [
        "device: cpu (torch sees no usable GPU)", "dtype: bf16 (the checkpoint's own is bf16)", "matmul: oneDNN, prepacked bf16 (float32 accumulation)",
        f"rms_norm: native ({built})", "sampling: reference (plain torch)", "KV dtype: bf16 (the run's dtype)", f"attention: native ({built})", "threads: 2",
    ]  # fmt: skip
    assert kernels_folded(choices) == [
        *choices[:2],
        f"kernels: matmul oneDNN, prepacked bf16; attention, rms_norm native, {built}; sampling plain torch (see batchinfer doctor)",
        "KV dtype: bf16 (the run's dtype)",
        "threads: 2",
    ]
    slow = "attention: reference, slower (no C++ compiler found)"
    assert kernels_folded(["device: cpu (x)", slow]) == ["device: cpu (x)", "kernels: attention plain torch (see batchinfer doctor)", slow]
    assert kernels_folded(["threads: 2"]) == ["threads: 2"]


def test_an_empty_line_under_the_panel_takes_what_the_terminal_echoes() -> None:
    """`^C` at the end of a full line would wrap, and the panel would be cleared one line too low."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    face = LiveFace(console)
    for snapshot in (None, SNAPSHOT):
        face.snapshot = snapshot
        last = console.render_lines(face._picture(), pad=False)[-1]
        assert "".join(segment.text for segment in last) == ""
