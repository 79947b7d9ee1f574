"""What a step adds to the run's counters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchinfer.core.plan import Plan
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


def count_step(stats: RunStats, plan: Plan, times: StepTimes) -> None:
    """Add a step's tokens and seconds; the forward pass is split between prefill and decode by tokens."""
    total = int(plan.num_tokens.sum())
    decode_share = int(np.count_nonzero(plan.num_tokens == 1)) / total if total else 0.0
    forward = times.ran - times.built
    stats.steps += 1
    stats.computed_tokens += total
    stats.seconds.schedule += times.built - times.began
    stats.seconds.decode += forward * decode_share
    stats.seconds.prefill += forward * (1.0 - decode_share)
    stats.seconds.sample += times.sampled - times.ran
    stats.seconds.retire += times.retired - times.sampled


def shape_of(plan: Plan, seconds: float) -> StepShape:
    """The step's counts as the physical limit needs them."""
    decoding = plan.num_tokens == 1
    long = ~decoding
    queries, before = plan.num_tokens[long].astype(np.float64), plan.start[long]
    return StepShape(
        num_decode=int(np.count_nonzero(decoding)),
        num_prefill=int(plan.num_tokens[long].sum()),
        num_logits=int(np.count_nonzero(plan.samples)),
        decode_context=int((plan.start[decoding] + 1).sum()),
        prefill_attention=float((queries * (before + queries / 2)).sum()),
        seconds=seconds,
    )
