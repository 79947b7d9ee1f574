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
    def drafted(self) -> bool:
        """Whether any span carried drafts."""
        return bool(self.num_drafts.any())

    @property
    def num_tokens(self) -> int:
        """Positions that went through the model, drafts included."""
        return int(self.plan.num_tokens.sum() + self.num_drafts.sum())


@dataclass(frozen=True, slots=True)
class SpanRows:
    """Whose spans a step computes; read before the step ends, while its rows still have their slots."""

    rows: np.ndarray  # int64 [S]
    num_prompt: np.ndarray  # int32 [S]
    admitted: np.ndarray  # bool [S]
    choices: np.ndarray  # int32 [S]

    @classmethod
    def of(cls, table: SequenceTable, plan: Plan) -> SpanRows:
        """The rows of a plan's spans."""
        slots = plan.slots
        admitted = np.zeros(len(slots), bool)
        if plan.num_joined:
            joined = [table.sequences[slot] for slot in slots[-plan.num_joined :].tolist()]
            admitted[-plan.num_joined :] = [seq is not None and not seq.num_preemptions for seq in joined]
        return cls(table.row[slots], table.num_prompt[slots], admitted, table.choice[slots])


def count_step(stats: RunStats, work: StepWork, times: StepTimes) -> None:
    """Add a step's tokens and seconds; the forward pass is split between prefill and decode by tokens."""
    total, single = work.num_tokens, work.plan.num_tokens == 1
    decoded = int(np.count_nonzero(single)) + int(work.num_drafts[single].sum() if work.drafted else 0)
    decode_share = decoded / total if total else 0.0
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
    plan, emitted = work.plan, work.emitted
    decoding = plan.num_tokens == 1
    num_decode, num_logits = int(np.count_nonzero(decoding)), int(np.count_nonzero(plan.samples))
    if work.drafted:
        more = np.maximum(emitted - 1, 0)
        num_decode, num_logits = num_decode + int(more[decoding].sum()), num_logits + int(more.sum())
    queries = before = np.empty(0)
    if not decoding.all():
        long = ~decoding
        queries, before = plan.num_tokens[long].astype(np.float64), plan.start[long]
    return StepShape(
        num_decode=num_decode,
        num_prefill=int(queries.sum()),
        num_logits=num_logits,
        decode_context=int(plan.start[decoding].sum()) + int(np.count_nonzero(decoding)),
        prefill_attention=float((queries * (before + queries / 2)).sum()),
        seconds=seconds,
        rows=who.rows,
        choices=who.choices,
        admitted=who.admitted,
        emitted=emitted,
        first=(plan.start + plan.num_tokens == who.num_prompt) & (emitted > 0),
    )
