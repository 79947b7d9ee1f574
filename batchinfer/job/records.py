"""What a job tells the outside: `JobInfo` at the start, `JobSnapshot` meanwhile, `JobReport` at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from batchinfer.core.stats import RunStats, StageSeconds, StepShape
from batchinfer.stopwatch import NO_STOPWATCH, Stopwatch

if TYPE_CHECKING:
    from batchinfer.build import JobNeed, ModelHandle
    from batchinfer.config import EngineConfig
    from batchinfer.core.request import SamplingParams
    from batchinfer.engine import Engine


@dataclass(frozen=True, slots=True)
class JobInfo:
    """What is known when the engine stands ready and before the first row runs."""

    model: str
    input: str
    output: str  # path, or "-" for stdout
    shape: str  # "plain" | "openai"
    num_rows: int | None  # None: not known without reading the whole input
    rows_done_before: int  # kept from an earlier, interrupted run
    treatment: str  # how prompts become what the model reads, as a sentence
    parameter_columns: tuple[str, ...]  # columns taken as sampling parameters in the first rows
    defaults: SamplingParams  # what a row without parameters gets
    choices: tuple[str, ...]  # one printable line for each automatic choice of the engine
    max_num_seqs: int
    max_model_len: int
    pool_tokens: int


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """The state of a running job. `rows_*` count this run and what was kept from earlier ones."""

    rows_done: int  # failed ones included
    rows_failed: int
    rows_read: int
    num_rows: int | None
    running: int
    waiting: int
    prompt_tokens: int  # of rows admitted in this run
    output_tokens: int  # generated in this run
    blocks_used: int
    blocks_total: int
    prefix_hit_rate: float
    preemptions: int
    elapsed_s: float  # since the first row was given to the engine
    fraction_read: float  # of the input's bytes (or rows), 0 to 1
    eta_s: float | None  # token-weighted; None while nothing can be said
    input_tokens_per_s: float  # over the last seconds
    output_tokens_per_s: float


@dataclass(slots=True)
class JobSeconds:
    """Where the wall time went. `start`: from process start to the job; `load`: model and engine."""

    wall: float = 0.0  # the whole process so far
    start: float = 0.0
    load: float = 0.0
    schedule: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    sample: float = 0.0
    retire: float = 0.0
    io: float = 0.0  # reading, rendering, tokenising, writing, finishing
    run: float = 0.0  # from the first admitted row to the last finished one
    finish: float = 0.0  # of `io`, joining the results with the input

    def take(self, spent: StageSeconds) -> None:
        """Take over what the engine measured."""
        self.schedule, self.prefill, self.decode = spent.schedule, spent.prefill, spent.decode
        self.sample, self.retire = spent.sample, spent.retire


@dataclass(slots=True)
class JobReport:
    """Everything that the end report and `OUTPUT.report.json` need from the job."""

    input: str
    output: str
    model: str
    num_rows: int | None = None  # how many rows were chosen; None: not known without reading the whole input
    rows_total: int = 0  # of these, the rows with a result
    rows_ok: int = 0
    rows_failed: int = 0
    rows_done_before: int = 0
    rows_truncated: int = 0  # whose prompt was cut to fit
    rows_skipped: int = 0  # left out because their prompt was too long
    rows_clipped: int = 0  # max_tokens cut by context or pool, and the row ended there
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)
    error_codes: dict[str, int] = field(default_factory=dict)
    first_errors: list[str] = field(default_factory=list)  # a few messages for the end report
    failed_positions: list[tuple[int, int]] = field(default_factory=list)  # ranges, last one included
    seconds: JobSeconds = field(default_factory=JobSeconds)
    stats: RunStats = field(default_factory=RunStats)
    settings: dict[str, Any] = field(default_factory=dict)
    choices: list[str] = field(default_factory=list)
    fingerprint: dict[str, Any] = field(default_factory=dict)
    delivered: dict[str, str] = field(default_factory=dict)  # files sent to a store, with the tags that it gave them
    peak_rss_mb: float = 0.0
    interrupted: int = 0  # the signal that ended the job, 0 for none
    already_complete: bool = False  # nothing was left to do
    message: str = ""  # a last word: "0 rows found", how to resume, ...

    @property
    def exit_code(self) -> int:
        """0 all rows fine, 3 some failed, 130 and 143 interrupted and resumable."""
        if self.interrupted:
            return 128 + self.interrupted
        if self.already_complete:
            return 0
        return 3 if self.rows_failed else 0


class JobObserver(Protocol):
    """A face of the job: a live panel, plain lines, or nothing."""

    def started(self, info: JobInfo) -> None:
        """The engine stands; the first row is about to run."""

    def prompt_shown(self, text: str) -> None:
        """The first rendered prompt, exactly as it is tokenised."""

    def answer_shown(self, row: int, text: str) -> None:
        """The first answer."""

    def tick(self, snapshot: JobSnapshot) -> None:
        """Called some ten times a second while rows run."""

    def step(self, shape: StepShape) -> None:
        """Called after every engine step; the physical limit is summed from these."""

    def note(self, text: str) -> None:
        """A line for people: a choice, a stage."""

    def warn(self, text: str) -> None:
        """A line that people should see even when they asked for silence."""


class NullObserver:
    """Says nothing."""

    def started(self, info: JobInfo) -> None:
        """Do nothing."""

    def prompt_shown(self, text: str) -> None:
        """Do nothing."""

    def answer_shown(self, row: int, text: str) -> None:
        """Do nothing."""

    def tick(self, snapshot: JobSnapshot) -> None:
        """Do nothing."""

    def step(self, shape: StepShape) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def warn(self, text: str) -> None:
        """Do nothing."""


def _open_model(config: EngineConfig) -> ModelHandle:
    from batchinfer.build import open_model

    return open_model(config)


def _build_engine(config: EngineConfig, model: ModelHandle, need: JobNeed | None) -> Engine:
    from batchinfer.build import build_engine  # imports torch: only when there is a row to run

    return build_engine(config, model, need)


def _model_fingerprint(model: ModelHandle) -> str:
    from batchinfer.weights.source import fingerprint

    return fingerprint(model.files)


def _nothing() -> None:
    """The face of a job without one."""


def _no_report(report: JobReport) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class JobParts:
    """What the job is handed rather than making it: tests hand it a fake engine, the command line its report.

    `report_json` turns the report into the keys of `OUTPUT.report.json`; the job adds fingerprint and failed
    positions, and writes the file in one piece before it removes its working files. `leave` is called, from any
    thread, before the process is ended at once: a terminal can be put right there. `hang_s`: how long the engine may
    take for a step before the process is ended, None for any time. `watch` measures the job's stages.
    """

    open_model: Callable[[EngineConfig], ModelHandle] = _open_model
    build_engine: Callable[[EngineConfig, ModelHandle, JobNeed | None], Engine] = _build_engine
    model_fingerprint: Callable[[ModelHandle], str] = _model_fingerprint
    report_json: Callable[[JobReport], Mapping[str, Any]] = _no_report
    leave: Callable[[], None] = _nothing
    hang_s: float | None = None
    watch: Stopwatch = NO_STOPWATCH
