"""How large the runs of an ablation are and how often they are repeated, so that all of it ends within its budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from batchinfer.reports.measurement import Measure, Measurement, TooSlow
from batchinfer.reports.variants import BASELINE, Variant
from batchinfer.reports.wording import in_words, plural
from batchinfer.reports.workload import Workload

PILOT_ROWS, PILOT_OUTPUT = 8, 4
SPEED_ROWS, SPEED_OUTPUT = 32, 16  # tokens of each row in the run that tells how fast everything on is
SLOW_FACTOR = 3.0  # times the baseline's time from which on a variant runs a slice
SLICE_ROWS, SLICE_OUTPUTS = (8, 4, 2, 1), (32, 24, 16, 12, 8, 6, 4)
SLICE_SHARE = 0.25  # of the time, at most, for runs of the slice
SLICE_ROUNDS = 3  # slow variants are far from 1.0: more rounds would add nothing
GROUP = 5  # variants between two runs of the baseline
WANTED_ROUNDS = (5, 4, 3)
FEW_ROUNDS = (3, 2, 1)
MOST_ROUNDS = 8
GENERATIONS = (4.0, 3.0, 2.0, 1.5, 1.25)  # rows over rows at once
FEW_GENERATIONS = (1.0, 0.5, 0.25, 0.0)
SHARES = (1.0, 0.7, 0.5, 0.35, 0.25)  # of the outputs' lengths
FEW_SHARES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12)  # short answers by as many rows as run at once tell more than long ones by fewer


@dataclass(frozen=True, slots=True)
class Pilot:
    """What short runs told: seconds of everything on, by token, and each variant's time over that of everything on."""

    prompt_token_s: float
    step_s: float  # of a step that generates, before its rows are counted
    row_step_s: float  # more for each row of such a step
    concurrency: int
    recomputed_token_s: float  # of everything on, had it no KV cache; times its factor right for a variant without one
    factors: Mapping[str, float]  # by variant
    given_up: Sequence[str] = ()  # variants that not even the pilot could end

    def seconds_for(self, workload: Workload) -> float:
        """How long everything on takes for a workload, roughly: its longest row generates alone in the end."""
        outputs = workload.most_output_tokens
        longest = max((request.params.max_tokens for request in workload.requests), default=0)
        steps = max(longest, outputs / self.concurrency)
        return self.prompt_token_s * workload.prompt_tokens + self.step_s * steps + self.row_step_s * outputs

    def seconds_of(self, variant: Variant, part: Workload, on_slice: bool) -> float:
        """How long a variant takes for a part, roughly."""
        recomputes = ("kv_cache", False) in variant.changes
        everything = self.recomputed_token_s * part.recomputed_tokens if on_slice and recomputes else self.seconds_for(part)
        return everything * self.factors.get(variant.name, 1.0)

    def is_slow(self, variant: Variant) -> bool:
        """True for a variant that cannot run the whole workload."""
        return variant.slow or self.factors[variant.name] > SLOW_FACTOR


@dataclass(frozen=True, slots=True)
class Sizes:
    """What was chosen for one concurrency."""

    whole: Workload
    slice: Workload  # for slow variants, and for what they are compared with
    slow: tuple[str, ...]
    rounds: int
    round_seconds: float
    output_share: float

    def in_words(self, concurrency: int) -> list[str]:
        """For people, and for the report's `choices`."""
        cut = "" if self.output_share == 1.0 else f", outputs cut to {self.output_share:.0%} of their lengths"
        lines = [
            f"at {concurrency}: {plural(len(self.whole.requests), 'row')}{cut} ({self.whole.prompt_tokens:,} prompt and "
            f"{self.whole.most_output_tokens:,} output tokens), {plural(self.rounds, 'round')} of about {in_words(self.round_seconds)}"
        ]
        if self.slow:
            most = max(request.params.max_tokens for request in self.slice.requests)
            lines.append(
                f"at {concurrency}, on a slice of {plural(len(self.slice.requests), 'row')} with at most {most} output tokens, as is what they are "
                f"compared with: {', '.join(self.slow)}"
            )
        return lines


def fly_pilot(variants: Sequence[Variant], workload: Workload, measure: Measure, is_over: Callable[[], bool]) -> Pilot:
    """Run every variant on a few rows: warms up what is slow the first time, and tells who is too slow for all of them.

    Variants that have not had their turn when `is_over` are given up.
    """
    everything = next(variant for variant in variants if variant.name == BASELINE)
    few = workload.shortest(min(PILOT_ROWS, everything.concurrency), PILOT_OUTPUT)
    measure(everything, few)
    small = measure(everything, few)
    least = small.seconds
    full = measure(everything, workload.part(min(SPEED_ROWS, everything.concurrency), most_output=SPEED_OUTPUT))
    factors: dict[str, float] = {}
    given_up: list[str] = []
    slowest = max((v for v in variants if v.slow), key=lambda v: _num_changed(v, everything), default=everything)
    for variant in variants:
        if variant.slow and variant is not slowest and _num_changed(variant, everything) > 1:
            continue  # a rung between two others: no slower than the lowest
        if variant is not everything and is_over():
            given_up.append(variant.name)
            continue
        try:
            factor = 1.0 if variant is everything else measure(variant, few).seconds / least
            if factor > SLOW_FACTOR and not variant.slow:
                factor = min(factor, measure(variant, few).seconds / least)  # the first run loads and warms up
        except TooSlow:
            given_up.append(variant.name)
            continue
        factors[variant.name] = factor
    step_s, row_step_s = _step_seconds(small, full)
    prompt_token_s = full.facts.prefill_seconds / max(1, full.facts.prompt_tokens)
    return Pilot(prompt_token_s, step_s, row_step_s, everything.concurrency, least / few.recomputed_tokens, factors, given_up)


def _step_seconds(small: Measurement, large: Measurement) -> tuple[float, float]:
    """Seconds of a generating step, as a part that every step has and one by row, from two runs of different width."""
    rows = [max(1, run.facts.peak_running) for run in (small, large)]
    waits = [
        run.itl.median / 1e3 if run.itl is not None else run.seconds / max(1, run.output_tokens) * n
        for run, n in zip((small, large), rows, strict=True)
    ]
    if rows[1] == rows[0]:
        return waits[1], 0.0
    by_row = max(0.0, (waits[1] - waits[0]) / (rows[1] - rows[0]))
    return max(0.0, waits[1] - by_row * rows[1]), by_row


def _num_changed(variant: Variant, everything: Variant) -> int:
    """Features that are off in a variant."""
    return sum(mine != its for mine, its in zip(variant.changes, everything.changes, strict=False))


def choose_sizes(variants: Sequence[Variant], workload: Workload, pilot: Pilot, seconds: float, repeats: int | None = None) -> Sizes:
    """The largest runs of which enough rounds fit into `seconds`; `repeats` asks for a number of rounds."""
    measured = [variant for variant in variants if variant.name not in pilot.given_up]
    slow = [variant for variant in measured if pilot.is_slow(variant)]
    fast = [variant for variant in measured if not pilot.is_slow(variant)]
    concurrency = variants[0].concurrency
    rounds_of_slices = min(SLICE_ROUNDS, repeats or SLICE_ROUNDS)
    part = _slice_of(workload, concurrency, slow, (pilot, SLICE_SHARE * seconds / rounds_of_slices))
    slices = sum(pilot.seconds_of(variant, part, on_slice=True) for variant in slow)
    left = seconds - slices * rounds_of_slices
    runs = sum(pilot.factors[variant.name] for variant in fast) + ceil(len(fast) / GROUP)

    def made(rounds: int, whole: Workload, share: float) -> Sizes:
        return Sizes(whole, part, tuple(v.name for v in slow), rounds, pilot.seconds_for(whole) * runs + slices, share)

    for wanted in (repeats,) if repeats is not None else WANTED_ROUNDS:
        for whole, share in _candidates(workload, concurrency):
            each = pilot.seconds_for(whole) * runs
            if each * wanted <= left:
                return made(repeats or max(wanted, min(MOST_ROUNDS, int(left / max(each, 1e-9)))), whole, share)
    for parts in (small := _wide_first(workload, concurrency)):
        for rounds in (repeats,) if repeats is not None else FEW_ROUNDS:
            for whole, share in parts:
                if pilot.seconds_for(whole) * runs * rounds <= left:
                    return made(rounds, whole, share)
    return made(repeats or 1, *small[-1][-1])


def _candidates(workload: Workload, concurrency: int) -> Iterator[tuple[Workload, float]]:
    """Parts of the workload, the largest first."""
    total = len(workload.requests)
    counts = dict.fromkeys(min(total, max(1, ceil(concurrency * times))) for times in GENERATIONS)
    parts = [(workload.part(count, share), share) for count in counts for share in SHARES]
    yield from sorted(parts, key=lambda pair: -(pair[0].prompt_tokens / 4 + pair[0].most_output_tokens))


def _wide_first(workload: Workload, concurrency: int) -> list[list[tuple[Workload, float]]]:
    """Small parts of the workload by their number of rows, many first, since what runs beside each other is what is measured."""
    counts = dict.fromkeys(min(len(workload.requests), max(1, ceil(concurrency * times))) for times in FEW_GENERATIONS)
    return [[(workload.part(count, share), share) for share in FEW_SHARES] for count in counts]


def _slice_of(workload: Workload, concurrency: int, slow: Sequence[Variant], limit: tuple[Pilot, float]) -> Workload:
    """The largest slice that all slow variants run once in so many seconds."""
    pilot, seconds = limit
    for rows in SLICE_ROWS:
        for output in SLICE_OUTPUTS:
            part = workload.part(min(rows, concurrency), most_output=output)
            if sum(pilot.seconds_of(variant, part, on_slice=True) for variant in slow) <= seconds:
                return part
    return part
