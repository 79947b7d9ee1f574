"""What a step adds to the run's counters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchinfer.core.plan import Drafts, Plan
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
    drafts: Drafts
    emitted: np.ndarray  # int32 [S], tokens appended to each span's row
    single: np.ndarray  # bool [S], the span is one token
    num_single: int

    @classmethod
    def of(cls, plan: Plan, drafts: Drafts, emitted: np.ndarray) -> StepWork:
        """Tell single tokens from longer spans, once for all that is counted."""
        single = plan.num_tokens == 1
        return cls(plan, drafts, emitted, single, int(np.count_nonzero(single)))

    @property
    def all_single(self) -> bool:
        """Whether no span is longer than a token: the steady case of a batch that only decodes."""
        return self.num_single == len(self.single)

    @property
    def num_drafted(self) -> int:
        """Guesses behind the spans."""
        return len(self.drafts.token_ids)


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
    total = (work.num_single if work.all_single else int(work.plan.num_tokens.sum())) + work.num_drafted
    decoded = work.num_single + (int(work.drafts.counts[work.single].sum()) if work.num_drafted else 0)
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
    num_decode, num_logits = work.num_single, int(np.count_nonzero(plan.samples))
    if work.num_drafted:
        more = np.maximum(emitted - 1, 0)
        num_decode, num_logits = num_decode + int(more[work.single].sum()), num_logits + int(more.sum())
    num_prefill, prefill_attention, decoded_from = 0, 0.0, plan.start
    if not work.all_single:
        long = ~work.single
        queries, before = plan.num_tokens[long].astype(np.float64), plan.start[long]
        num_prefill, prefill_attention = int(queries.sum()), float((queries * (before + queries / 2)).sum())
        decoded_from = plan.start[work.single]
    return StepShape(
        num_decode=num_decode,
        num_prefill=num_prefill,
        num_logits=num_logits,
        decode_context=int(decoded_from.sum()) + work.num_single,
        prefill_attention=prefill_attention,
        seconds=seconds,
        rows=who.rows,
        choices=who.choices,
        admitted=who.admitted,
        emitted=emitted,
        first=(plan.start + plan.num_tokens == who.num_prompt) & (emitted > 0),
    )
