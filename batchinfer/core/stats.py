"""Counters of a run. Pure numbers: the engine adds to them, reports read them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


def _nobody() -> np.ndarray:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What one step computed, as the physical limit needs it (performance is judged against these counts).

    Drafts count where the model agreed: what it did not agree with was no work that had to be done.
    """

    num_decode: int  # tokens of sequences whose span was one token, and the drafts accepted after it
    num_prefill: int  # tokens of all longer spans
    num_logits: int  # rows that went through the LM head
    decode_context: int  # sum over decoding sequences of the tokens attended to
    prefill_attention: float  # sum over longer spans of q * (context before + q / 2)
    seconds: float  # wall time of the whole step
    rows: np.ndarray = field(default_factory=_nobody)  # int64 [S], `Request.row` of each span
    choices: np.ndarray = field(default_factory=_nobody)  # int32 [S], which of the row's answers the span is of
    admitted: np.ndarray = field(default_factory=_nobody)  # bool [S], the answer entered for the first time in this step
    emitted: np.ndarray = field(default_factory=_nobody)  # int32 [S], tokens appended to the row
    first: np.ndarray = field(default_factory=_nobody)  # bool [S], the answer's first output token is among them


def ignore_step(shape: StepShape) -> None:
    """The listener that does not listen."""


@dataclass(slots=True)
class StageSeconds:
    """Wall seconds by stage. Forward time of a mixed step is split between prefill and decode by tokens."""

    schedule: float = 0.0  # schedule, reserve, propose, build the batch
    prefill: float = 0.0
    decode: float = 0.0
    sample: float = 0.0
    retire: float = 0.0


@dataclass(slots=True)
class RunStats:
    """Totals since the engine was built, and the present state of queue and pool."""

    steps: int = 0
    rows_finished: int = 0
    prompt_tokens: int = 0  # of admitted rows, each row once
    cached_prompt_tokens: int = 0  # of those, found in the prefix cache at the row's first admission
    computed_tokens: int = 0  # token positions that went through the model
    recomputed_tokens: int = 0  # computed again after a preemption
    output_tokens: int = 0
    drafted_spans: int = 0  # spans with guessed tokens behind them
    proposed_tokens: int = 0  # guessed tokens that were verified
    accepted_tokens: int = 0  # of those, the ones that the model agreed with: each saved its row a step
    preemptions: int = 0
    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0  # referenced by running rows
    peak_blocks_used: int = 0
    peak_running: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)
    clipped_rows: int = 0  # rows whose max_tokens was cut by context or pool, and that ended there
    seconds: StageSeconds = field(default_factory=StageSeconds)

    def count_end(self, reason: str, clipped: bool) -> None:
        """A sequence ended for this reason."""
        self.rows_finished += 1
        self.finish_reasons[reason] = self.finish_reasons.get(reason, 0) + 1
        self.clipped_rows += clipped

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens that the prefix cache gave."""
        return self.cached_prompt_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
