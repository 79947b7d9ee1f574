"""What each feature is worth: paired, interleaved runs of the engine with everything on and with one thing different.

A round runs every variant once, in an order that is rotated from round to round, with the baseline between groups of
them. A variant's speed is taken relative to the baseline just before and just after it, so that a machine that slows
down for a while slows both. Ratios are means of the rounds' logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from batchinfer.reports.ablation_plan import GROUP, SLICE_ROUNDS, Pilot, Sizes, choose_sizes, fly_pilot
from batchinfer.reports.measurement import Measure, Measurement, TooSlow
from batchinfer.reports.variants import BASELINE, Comparison, Rung, Variant
from batchinfer.reports.wording import in_words
from batchinfer.reports.workload import Workload

WHOLE, SLICE = "whole", "slice"
PILOT_SHARE = 0.35  # of a column's time, at most, before the pilot takes no further variants
OVERTIME_S = 20.0  # that a run may take beyond its column's time before it is given up
PLANNED_SHARE = 0.92  # of a column's time that its rounds are planned for: variants may be slower than the pilot said


@dataclass(frozen=True, slots=True)
class Column:
    """What is compared at one concurrency."""

    concurrency: int
    everything: Variant
    comparisons: Sequence[Comparison]
    rungs: Sequence[Rung] = ()

    @property
    def variants(self) -> list[Variant]:
        """Every configuration once, everything on first."""
        named = [self.everything, *(v for c in self.comparisons for v in (c.on, c.off)), *(rung.variant for rung in self.rungs)]
        return list({variant.name: variant for variant in named}.values())

    @property
    def pairs(self) -> list[tuple[Variant, Variant]]:
        """The configurations that are compared with each other."""
        steps = [(above.variant, below.variant) for below, above in zip(self.rungs, self.rungs[1:], strict=False)]
        return [*((c.on, c.off) for c in self.comparisons), *steps]


@dataclass(slots=True)
class ColumnRuns:
    """Everything that was measured at one concurrency."""

    column: Column
    pilot: Pilot | None = None
    sizes: Sizes | None = None
    runs: dict[tuple[str, str], list[Measurement]] = field(default_factory=dict)  # by part and variant
    relative: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)  # log of the speed over the baseline's, by round
    given_up: list[str] = field(default_factory=list)  # variants without a single run
    rounds: int = 0  # begun

    def part_of(self, on: Variant, off: Variant) -> str:
        """Which part of the workload two variants are compared on."""
        slow = self.sizes.slow if self.sizes is not None else ()
        return SLICE if on.name in slow or off.name in slow else WHOLE

    def log_ratios(self, on: Variant, off: Variant) -> list[float]:
        """Logarithms of the speed of `on` over that of `off`, one for each round that ran both."""
        part = self.part_of(on, off)
        first, second = self.relative.get((part, on.name), {}), self.relative.get((part, off.name), {})
        return [first[number] - second[number] for number in first if number in second]

    def of(self, part: str, variant: Variant) -> list[Measurement]:
        """The runs of a variant."""
        return self.runs.get((part, variant.name), [])


@dataclass(slots=True)
class Ablation:
    """Runs the columns one after another within a budget. `clock` is in seconds; `tell` hears what was chosen and done.

    `give_up_at` is called before each run with the time of the clock at which the run is to raise `TooSlow`.
    """

    measure: Measure
    clock: Callable[[], float]
    tell: Callable[[str], None]
    budget_s: float
    repeats: int | None = None
    give_up_at: Callable[[float], None] = lambda moment: None
    columns: list[ColumnRuns] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)
    interrupted: bool = False

    def run(self, columns: Sequence[Column], workload: Workload) -> None:
        """Measure. Ctrl-C ends it early; what was measured until then is kept."""
        end = self.clock() + self.budget_s
        try:
            for index, column in enumerate(columns):
                self._column(column, workload, (end - self.clock()) / (len(columns) - index))
        except KeyboardInterrupt:
            self.interrupted = True

    def _column(self, column: Column, workload: Workload, seconds: float) -> None:
        until = self.clock() + seconds
        found = ColumnRuns(column)
        self.columns.append(found)
        try:
            pilot = found.pilot = self._pilot(column, workload, until - (1 - PILOT_SHARE) * seconds, until)
        except TooSlow:
            self._chose(
                f"at {column.concurrency}: nothing could be measured in {in_words(seconds)}; give more with --budget-s, or fewer --rows"
            )
            return
        found.given_up += pilot.given_up
        left = until - self.clock()
        sizes = found.sizes = choose_sizes(column.variants, workload, pilot, max(left, 0.0) * PLANNED_SHARE, self.repeats)
        for line in sizes.in_words(column.concurrency):
            self._chose(line)
        took = sizes.round_seconds
        for number in range(sizes.rounds):
            began = self.clock()
            if number and began + took > until:
                self._chose(f"at {column.concurrency}: {number} of {sizes.rounds} rounds, for want of time")
                break
            found.rounds += 1
            self.tell(f"at {column.concurrency}: round {number + 1} of {sizes.rounds}")
            self._round(found, number, until)
            took = self.clock() - began

    def _pilot(self, column: Column, workload: Workload, over: float, until: float) -> Pilot:
        """Everything on may take all of the column's time, the others only the pilot's."""

        def measure(variant: Variant, part: Workload) -> Measurement:
            self.give_up_at(until if variant.name == BASELINE else over)
            return self.measure(variant, part)

        self.tell(f"at {column.concurrency}: short runs to warm up and to choose sizes")
        quick_first = sorted(column.variants, key=lambda variant: variant.slow)
        return fly_pilot(quick_first, workload, measure, lambda: self.clock() > over)

    def _chose(self, line: str) -> None:
        self.choices.append(line)
        self.tell(line)

    def _round(self, found: ColumnRuns, number: int, until: float) -> None:
        """Every variant once, unless its run would end after `until`; a round that is broken off counts as far as it came."""
        assert found.sizes is not None
        done: list[tuple[str, float]] = []
        try:
            for variant in _order(self._fast(found), found.column.everything, number):
                self._run(found, WHOLE, variant, (done, until))
        finally:
            _pair(found, WHOLE, done, number)
        if number < SLICE_ROUNDS and found.sizes.slow:
            done = []
            try:
                everything = found.column.everything  # short beside slow variants: run between any two of them
                for variant in [everything, *(v for slow in _on_slice(found) for v in (slow, everything))]:
                    self._run(found, SLICE, variant, (done, until))
            finally:
                _pair(found, SLICE, done, number)

    def _fast(self, found: ColumnRuns) -> list[Variant]:
        assert found.sizes is not None
        left_out = {BASELINE, *found.sizes.slow, *found.given_up}
        return [variant for variant in found.column.variants if variant.name not in left_out]

    def _run(self, found: ColumnRuns, part: str, variant: Variant, this_round: tuple[list[tuple[str, float]], float]) -> None:
        assert found.sizes is not None
        assert found.pilot is not None
        done, until = this_round
        workload = found.sizes.whole if part == WHOLE else found.sizes.slice
        before = found.of(part, variant)
        expected = before[-1].seconds if before else found.pilot.seconds_of(variant, workload, part == SLICE)
        if variant.name in found.given_up or (variant.name != BASELINE and self.clock() + expected > until):
            return
        self.give_up_at(until + OVERTIME_S)
        try:
            run = self.measure(variant, workload)
        except TooSlow:
            if not before:
                found.given_up.append(variant.name)
            return
        found.runs.setdefault((part, variant.name), []).append(run)
        done.append((variant.name, math.log(max(run.rate, 1e-9))))


def _order(variants: Sequence[Variant], everything: Variant, number: int) -> list[Variant]:
    """The variants rotated by the round's number, the baseline before each group of them and at the end."""
    if not variants:
        return [everything]
    turn = number * max(1, len(variants) // 3) % len(variants)  # neighbours change, too
    rotated = [*variants[turn:], *variants[:turn]]
    if number % 2:
        rotated.reverse()
    order: list[Variant] = []
    for begin in range(0, len(rotated), GROUP):
        order += [everything, *rotated[begin : begin + GROUP]]
    return [*order, everything]


def _on_slice(found: ColumnRuns) -> list[Variant]:
    """Slow variants, and those that are compared with them."""
    assert found.sizes is not None
    wanted = {v.name: v for pair in found.column.pairs for v in pair if found.part_of(*pair) == SLICE and v.name != BASELINE}
    return list(wanted.values())


def _pair(found: ColumnRuns, part: str, done: Sequence[tuple[str, float]], number: int) -> None:
    """Relate each run of a round to the runs of the baseline before and after it, weighed by how near they are."""
    places = [index for index, (name, _) in enumerate(done) if name == BASELINE]
    if not places:
        return
    found.relative.setdefault((part, BASELINE), {})[number] = 0.0
    speeds = [done[place][1] for place in places]
    for index, (name, speed) in enumerate(done):
        if name != BASELINE:
            found.relative.setdefault((part, name), {})[number] = speed - float(np.interp(index, places, speeds))
