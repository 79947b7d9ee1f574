"""What a step adds to the run's counters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchinfer.core.plan import Plan
from batchinfer.core.sequences import SequenceTable
from batchinfer.core.stats import RunStats, StepShape


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Readings of one clock, in seconds, at the borders of a step's stages."""

    began: float
    built: float
    ran: float
    sampled: float
    retired: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.retired - self.began


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step was asked for and what came of it."""

    plan: Plan
    num_drafts: np.ndarray  # int32 [S]
    emitted: np.ndarray  # int32 [S], tokens appended to each span's row

    @property
    def num_tokens(self) -> int:
        """Positions that went through the model, drafts included."""
        return int(self.plan.num_tokens.sum() + self.num_drafts.sum())


@dataclass(frozen=True, slots=True)
class SpanRows:
    """Whose spans a step computes; read before the step ends, while its rows still have their slots."""

    rows: np.ndarray  # int64 [S]
    admitted: np.ndarray  # bool [S]
    untold: np.ndarray  # bool [S], no output token yet

    @classmethod
    def of(cls, table: SequenceTable, plan: Plan) -> SpanRows:
        """The rows of a plan's spans."""
        slots = plan.slots
        admitted = np.zeros(len(slots), bool)
        for index in range(len(slots) - plan.num_joined, len(slots)):
            seq = table.sequences[slots[index]]
            admitted[index] = seq is not None and not seq.num_preemptions
        return cls(table.row[slots], admitted, table.num_tokens[slots] == table.num_prompt[slots])


def count_step(stats: RunStats, work: StepWork, times: StepTimes) -> None:
    """Add a step's tokens and seconds; the forward pass is split between prefill and decode by tokens."""
    total, single = work.num_tokens, work.plan.num_tokens == 1
    decode_share = (int(np.count_nonzero(single)) + int(work.num_drafts[single].sum())) / total if total else 0.0
    forward = times.ran - times.built
    stats.steps += 1
    stats.computed_tokens += total
    stats.seconds.schedule += times.built - times.began
    stats.seconds.decode += forward * decode_share
    stats.seconds.prefill += forward * (1.0 - decode_share)
    stats.seconds.sample += times.sampled - times.ran
    stats.seconds.retire += times.retired - times.sampled


def shape_of(work: StepWork, who: SpanRows, seconds: float) -> StepShape:
    """The step's counts as the physical limit needs them, and whose they are."""
    plan = work.plan
    decoding = plan.num_tokens == 1
    long = ~decoding
    queries, before = plan.num_tokens[long].astype(np.float64), plan.start[long]
    return StepShape(
        num_decode=int(np.maximum(work.emitted[decoding], 1).sum()),
        num_prefill=int(plan.num_tokens[long].sum()),
        num_logits=int(np.maximum(work.emitted, plan.samples).sum()),
        decode_context=int((plan.start[decoding] + 1).sum()),
        prefill_attention=float((queries * (before + queries / 2)).sum()),
        seconds=seconds,
        rows=who.rows,
        admitted=who.admitted,
        emitted=work.emitted,
        first=who.untold & (work.emitted > 0),
    )
