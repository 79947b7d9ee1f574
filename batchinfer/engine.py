"""The engine: requests in, results out, one ragged batch at a time. `step()` is the heart; read it first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from batchinfer.core.accounting import SpanRows, StepTimes, StepWork, count_step, shape_of
from batchinfer.core.admission import CheckedOnce, EngineLimits, admissible, token_limit
from batchinfer.core.choices import ChoiceGroups
from batchinfer.core.drafts import DraftProposer, clear_nothing, copy_nothing
from batchinfer.core.logprobs import RowScores
from batchinfer.core.memory import KVMemory
from batchinfer.core.plan import Drafts, Plan, StepResult
from batchinfer.core.request import FinishReason, Request, Result, structure_of
from batchinfer.core.retention import Retention
from batchinfer.core.scheduler import Scheduler
from batchinfer.core.sequences import Sequence
from batchinfer.core.stats import RunStats, StepShape, ignore_step
from batchinfer.core.stop import REASONS, StopChecker
from batchinfer.core.structure import NoStructures, Structures
from batchinfer.errors import InputError
from batchinfer.runtime.data_plane import DataPlane
from batchinfer.runtime.isolation import Fault, Isolation

if TYPE_CHECKING:
    from batchinfer.core.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """The parts that decide."""

    scheduler: Scheduler
    memory: KVMemory
    stopper: StopChecker
    drafter: DraftProposer
    retention: Retention
    scores: RowScores
    clear: Callable[[np.ndarray], None] = clear_nothing  # of what the proposer keeps in blocks that hold damage
    copy: Callable[[list[tuple[int, int]]], None] = copy_nothing  # of the same
    structures: Structures = field(default_factory=NoStructures)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What was decided when the engine was built: a printable line for each automatic choice, and the settings."""

    choices: list[str] = field(default_factory=list)
    settings: dict[str, object] = field(default_factory=dict)


def ignore_notice(text: str) -> None:
    """The listener that does not listen."""


class Engine:
    """Runs requests to completion, one ragged batch at a time."""

    def __init__(self, control: ControlPlane, device: DataPlane, limits: EngineLimits, vocabulary: Vocabulary, facts: EngineFacts) -> None:
        self.scheduler = control.scheduler
        self.memory = control.memory
        self.stopper = control.stopper
        self.drafter = control.drafter
        self.retention = control.retention
        self.scores = control.scores
        self.structures = control.structures
        self.batcher = device.batcher
        self.runner = device.runner
        self.head = device.head
        self._clear, self._copy = device.clear, device.copy
        self._isolation = Isolation(self._compute_part)
        self.limits = limits
        self.stats: RunStats = self.memory.stats
        self.on_step: Callable[[StepShape], None] = ignore_step
        self.on_notice: Callable[[str], None] = ignore_notice  # hears what a person should know
        self.choices = facts.choices
        self.settings = facts.settings
        self._vocabulary = vocabulary
        self._window = max(2 * limits.max_num_seqs, 512)
        self._next_id, self._groups = 0, ChoiceGroups()
        self._params = CheckedOnce()

    @property
    def num_unfinished(self) -> int:
        """Rows running or waiting."""
        return self.memory.table.num_running + self.scheduler.num_waiting

    def step(self) -> list[Result]:
        """Compute one batch and return the rows that ended with it."""
        began = perf_counter()
        schedule = self.scheduler.schedule()  # 1 who, and how many tokens
        plan = self.memory.reserve(schedule)  # 2 prefix match, then blocks
        self.scheduler.settle(plan)
        self._copy(plan.copies)  # partial blocks of prompts that several answers go on from
        drafts = Drafts.none(len(plan.slots))
        who = SpanRows.of(self.memory.table, plan) if self.on_step is not ignore_step else None
        built = ran = perf_counter()
        fault: Fault | None = None
        try:
            drafts = self.drafter.propose(plan)  # 3 guess ahead, within the reservation
            batch = self.batcher.build(plan, drafts)
            built = perf_counter()
            hidden = self.runner.forward(batch)  # 4 one ragged forward
            ran = perf_counter()
            result = self.head.decide(hidden, batch)  # 5 sample and verify
            self._isolation.succeeded()
            self.scheduler.recover()
        except Exception as error:  # a kernel, memory, an assertion: only the rows that cause it may suffer
            fault = Fault.of(error)
        if fault is not None:
            batch = hidden = None  # what the failed step holds must be free before it is tried again
            drafts = Drafts.none(len(plan.slots))
            result = self._retry(plan, fault)
        sampled = perf_counter()
        self._learn(plan, drafts, result)
        finished, emitted = self.retire(plan, result)  # 6 append, publish, release, report
        work = StepWork.of(plan, drafts, emitted)
        times = StepTimes(began, built, ran, sampled, perf_counter())
        self._account(work, who, times)
        return finished

    def run(self, requests: Iterable[Request | Result | None]) -> Iterator[Result]:
        """Yield results as rows finish, in any order, reading no further ahead than the look-ahead window.

        A `Result` among the requests is a row that failed earlier and passes through; None means "nothing to read
        just now" and lets the engine step on instead of waiting.
        """
        try:
            yield from self._run(self.structures.ahead(iter(requests), structure_of))
        finally:
            self.abort()  # a run that is given up leaves no row behind for the next one

    def add(self, request: Request) -> None:
        """Queue one row. Raises `InputError` when it could never run: refused now, it never blocks the queue."""
        self._params.check(request.params)
        request = admissible(request, self.limits, self._vocabulary.size)
        self.structures.require(request.params.structured_outputs)
        limit, clipped = token_limit(request, self.limits)
        seqs = [Sequence(self._next_id + choice, request, limit, clipped, choice) for choice in range(request.params.n)]
        self._next_id += len(seqs)
        self._groups.add(seqs)
        for seq in seqs:
            self.scheduler.queue.push(seq)

    def abort(self) -> None:
        """Drop every unfinished row and give all memory back."""
        slots = self.memory.table.running().copy()
        self.memory.release(slots)
        for _ in self.scheduler.queue.take():
            pass
        self.scores.clear()
        self._groups.clear()

    def retire(self, plan: Plan, result: StepResult) -> tuple[list[Result], np.ndarray]:
        """The one place where rows change because of the model: append, stop, publish, release.

        Returns the rows that ended and how many tokens each span's row was given, int32 [S].
        """
        if result.failures or result.postponed:
            return self._fail(plan, result)
        table = self.memory.table
        sampling = plan.slots[plan.samples]
        added, verdict = self.stopper.append(sampling, result)
        emitted = np.zeros(len(plan.slots), np.int32)
        emitted[plan.samples] = added
        computed = plan.start + plan.num_tokens
        table.num_computed[plan.slots] = computed if len(result.token_ids) == len(sampling) else computed + np.maximum(emitted - 1, 0)
        self.memory.publish(plan)
        self.retention.step_ended(plan.slots)
        self.stats.output_tokens += int(added.sum())
        ended = np.flatnonzero(verdict)
        slots = sampling[ended]
        ends = zip(slots.tolist(), verdict[ended].tolist(), strict=True)
        finished = [result for slot, code in ends for result in self._finish(slot, REASONS[code])]
        self.memory.release(slots)
        return finished, emitted

    def _compute_part(self, part: Plan) -> StepResult:
        batch = self.batcher.build(part, Drafts.none(len(part.slots)))
        return self.head.decide(self.runner.forward(batch), batch)

    def _retry(self, plan: Plan, fault: Fault) -> StepResult:
        """Compute a failed step again in parts; with less in the steps to come when memory was short."""
        if fault.out_of_memory:
            budget = self.scheduler.shrink(len(plan.slots), int(plan.num_tokens.sum()))
            self.on_notice(f"memory ran out: {budget.max_num_batched_tokens:,} tokens of {budget.max_num_seqs:,} rows a step for a while")
        else:
            self.on_notice(f"a step failed ({fault.words}, {fault.place}); looking for the rows that cause it")
        return self._isolation.retry(plan, fault)

    def _fail(self, plan: Plan, result: StepResult) -> tuple[list[Result], np.ndarray]:
        """End the rows that cannot go on, clear what they wrote, and retire the others that were computed."""
        failed = np.array(list(result.failures), np.int64)
        results: list[Result] = []
        for slot, error in result.failures.items():
            seq = self.memory.table.sequences[slot]
            assert seq is not None
            self.scores.finish(seq, 0)
            results += self._groups.ended(seq, Result(seq.request.row, num_prompt_tokens=len(seq.request.prompt_ids), error=error))
        stay = ~np.isin(plan.slots, [*result.failures, *result.postponed])
        rest = result.part(stay[plan.samples])
        if len(failed):
            self._clear(self.memory.discard(failed))
        self.stats.rows_finished += len(failed)
        finished, added = self.retire(plan.part(stay), rest)
        emitted = np.zeros(len(plan.slots), np.int32)
        emitted[stay] = added
        return results + finished, emitted

    def _finish(self, slot: int, reason: FinishReason) -> list[Result]:
        seq = self.memory.table.sequences[slot]
        assert seq is not None
        output_ids = self.memory.table.output_of(slot)
        cut = seq.clipped and reason == "length"
        self.stats.count_end(reason.value, cut)
        if not seq.request.params.ignore_eos:
            self.scheduler.forecast.finished(len(output_ids))
        logprobs, prompt_logprobs = self.scores.finish(seq, len(output_ids))
        result = Result(
            row=seq.request.row,
            text=self.stopper.text(seq, output_ids, reason),
            finish_reason=reason,
            token_ids=output_ids,
            num_prompt_tokens=len(seq.request.prompt_ids),
            num_cached_tokens=seq.num_cached,
            num_preemptions=seq.num_preemptions,
            clipped=cut,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            prompt_ids=None if prompt_logprobs is None else seq.request.prompt_ids,
        )
        return self._groups.ended(seq, self.structures.judged(result, seq.request))

    def _run(self, source: Iterator[Request | Result | None]) -> Iterator[Result]:
        exhausted = False
        while not exhausted or self.num_unfinished:
            if not exhausted and self.scheduler.num_waiting <= self._window // 2:
                for item in source:
                    if isinstance(item, Result):
                        yield item
                    elif item is None:
                        break
                    else:
                        yield from self._try_add(item)
                    if self.scheduler.num_waiting >= self._window:
                        break
                else:
                    exhausted = True
            if self.num_unfinished:
                yield from self.step()

    def _try_add(self, request: Request) -> Iterator[Result]:
        try:
            self.add(request)
        except InputError as error:
            yield Result.failed(request.row, error, len(request.prompt_ids))

    def _learn(self, plan: Plan, drafts: Drafts, result: StepResult) -> None:
        """Tell the proposer what became of its guesses."""
        if not len(drafts.token_ids):
            return
        accepted = np.zeros(len(plan.slots), np.int32)
        accepted[plan.samples] = result.counts - 1
        self.drafter.learn(plan, drafts, accepted)
        stats = self.stats
        stats.drafted_spans += int(np.count_nonzero(drafts.counts))
        stats.proposed_tokens += len(drafts.token_ids)
        stats.accepted_tokens += int(accepted.sum())

    def _account(self, work: StepWork, who: SpanRows | None, times: StepTimes) -> None:
        count_step(self.stats, work, times)
        self.stats.waiting = self.scheduler.num_waiting
        if who is not None:
            self.on_step(shape_of(work, who, times.total))
