"""One line on why a feature is worth less than nothing here, from what was measured where that tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batchinfer.reports.intervals import Ratio
from batchinfer.reports.measurement import Facts
from batchinfer.reports.workload import Workload


@dataclass(frozen=True, slots=True)
class Sides:
    """What was seen with the feature and without it, and on what."""

    on: Facts
    off: Facts
    workload: Workload
    concurrency: int

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(request.prompt_ids) for request in self.workload.requests)

    @property
    def mean_context(self) -> float:
        """Tokens that a row holds on average, halfway through its output."""
        rows = len(self.workload.requests)
        return (self.workload.prompt_tokens + self.workload.most_output_tokens / 2) / max(1, rows)

    @property
    def accepted_share(self) -> float | None:
        """Share of guessed tokens that the model agreed with; None when none was guessed."""
        return self.on.accepted_tokens / self.on.proposed_tokens if self.on.proposed_tokens else None


def reason_for(name: str, ratio: Ratio, sides: Sides) -> str:
    """Why the ratio is below one."""
    reason = REASONS[name](sides) if name in REASONS else ""
    if ratio.low is not None and not ratio.differs_from_one:
        return f"not to be told from 1.00x in {ratio.rounds} rounds" + (f"; {reason}" if reason else "")
    return reason or "it costs more here than it saves"


def _speculation(sides: Sides) -> str:
    share = sides.accepted_share
    if share is None:
        return "nothing was guessed: no text repeated itself, and looking for it costs a little"
    return f"{share:.0%} of the guessed tokens were right, and verifying the others costs more than it saves at {sides.concurrency} rows a step"


def _adaptive(sides: Sides) -> str:
    share = sides.accepted_share
    if share is None:
        return "it guessed nothing, as it should where guessing does not pay; what is left is measuring noise and the search"
    return f"it guessed {sides.on.proposed_tokens:,} tokens to find out that {share:.0%} of them are right, too few at {sides.concurrency} rows a step"


def _prefix_cache(sides: Sides) -> str:
    return f"{sides.on.prefix_hit_rate:.0%} of the prompt tokens were found in the cache: too few to pay for keeping and searching it"


def _prefix_order(sides: Sides) -> str:
    return f"prefix hits are {sides.on.prefix_hit_rate:.0%} with it and {sides.off.prefix_hit_rate:.0%} in the order of arrival: there was little to group"


def _chunked(sides: Sides) -> str:
    if sides.longest_prompt <= sides.on.step_tokens:
        return f"no prompt is longer than a step ({sides.longest_prompt:,} of {sides.on.step_tokens:,} tokens), so whole ones fit as well"
    return "cut prompts read their keys and values once more for every piece"


def _paged(sides: Sides) -> str:
    if sides.off.peak_running >= sides.on.peak_running and not sides.off.preemptions:
        return f"the pool held {sides.off.peak_running} rows at once without it, too: nothing was short"
    return "looking blocks up costs more here than the rows that fit beside each other save"


def _batching(sides: Sides) -> str:
    rows = len(sides.workload.requests)
    return (
        f"{rows} rows at {sides.concurrency} at once: few ever wait for others"
        if rows <= sides.concurrency
        else "outputs end together here"
    )


def _quantization(sides: Sides) -> str:
    return f"8-bit products save less at {sides.concurrency} rows a step than rotating and quantising what they multiply costs"


def _kv_quant(sides: Sides) -> str:
    return f"a row holds {sides.mean_context:,.0f} tokens on average: reading them is too little of a step to win by halving it"


def _flash(sides: Sides) -> str:
    return f"contexts of {sides.mean_context:,.0f} tokens are too short for it to matter"


def _graphs(sides: Sides) -> str:
    return "launching operations singly is no slower on this machine"


def _kv_cache(sides: Sides) -> str:
    return "outputs are too short for recomputing to cost anything"


REASONS: dict[str, Callable[[Sides], str]] = {
    "kv_cache": _kv_cache,
    "paged": _paged,
    "continuous_batching": _batching,
    "prefix_cache": _prefix_cache,
    "prefix_order": _prefix_order,
    "chunked_prefill": _chunked,
    "quantization": _quantization,
    "kv_quant": _kv_quant,
    "flash_attention": _flash,
    "graphs": _graphs,
    "speculation_fixed": _speculation,
    "speculation_adaptive": _adaptive,
}
