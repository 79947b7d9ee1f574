"""Who runs in this step, with how many tokens. Policy only: it allocates nothing and reads the clock never."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from batchinfer.core.forecast import OutputForecast, peak_tokens
from batchinfer.core.memory import KVMemory
from batchinfer.core.order import WaitingQueue
from batchinfer.core.plan import Join, Plan, Schedule
from batchinfer.core.prefix_cache import Key
from batchinfer.core.sequences import Sequence

MAX_PASSED_OVER = 64  # rows that wait for a prefix being computed, skipped in one step before admission stops


class ChunkPolicy(Protocol):
    """How spans of several tokens may be cut to the budget."""

    def share(self, todo: np.ndarray, budget: int) -> np.ndarray:
        """Tokens to compute per running row, int32 [S], of `todo` in order."""

    def grant(self, todo: int, left: int, first: bool) -> int:
        """Tokens to compute of a row that joins, with `left` in the budget; `first` when nothing else runs in the step."""


class ChunkedPrefill:
    """Cut prompts wherever the budget ends."""

    def share(self, todo: np.ndarray, budget: int) -> np.ndarray:
        """Each row what it has to do, until the budget ends within one."""
        before = np.cumsum(todo) - todo
        grants: np.ndarray = np.clip(budget - before, 0, todo)
        return grants

    def grant(self, todo: int, left: int, first: bool) -> int:
        """As much as fits."""
        return min(todo, left)


class WholePrompts:
    """Never cut a prompt; one longer than the budget runs in a step of its own."""

    def share(self, todo: np.ndarray, budget: int) -> np.ndarray:
        """Each row all or nothing."""
        grants = np.zeros(len(todo), np.int32)
        left = budget
        for index, tokens in enumerate(todo.tolist()):
            grants[index] = self.grant(tokens, left, left == budget)
            left -= int(grants[index])
        return grants

    def grant(self, todo: int, left: int, first: bool) -> int:
        """All or nothing."""
        return todo if todo <= left or first else 0


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int


class Scheduler:
    """Running rows first, oldest admission first; then waiting rows while budget, slots and forecast memory last."""

    def __init__(self, memory: KVMemory, queue: WaitingQueue, budget: Budget, chunks: ChunkPolicy) -> None:
        self.queue = queue
        self.forecast = OutputForecast()
        self._memory = memory
        self._table = memory.table
        self._budget = budget
        self._chunks = chunks
        # Blocks kept out of admission, so that a wrong forecast rarely ends in preemption.
        self._watermark = max(1, memory.pool.num_blocks // 100)

    @property
    def num_waiting(self) -> int:
        """Rows not running."""
        return len(self.queue)

    def schedule(self) -> Schedule:
        """Spend the step's budget."""
        table = self._table
        slots = table.running().copy()
        todo = table.num_tokens[slots] - table.num_computed[slots]
        left = self._budget.max_num_batched_tokens - len(slots)
        if left >= 0 and int(todo.max(initial=0)) <= 1:  # every running row decodes
            grants = todo
        else:
            grants = self._chunks.share(todo, self._budget.max_num_batched_tokens)
            left = self._budget.max_num_batched_tokens - int(grants.sum())
        joins = self._admissions(left, len(slots)) if left > 0 and len(self.queue) else []
        return Schedule(slots, grants, joins)

    def shrink(self) -> Budget:
        """Halve what a step may compute, because memory ran out; returns the new budget."""
        most = max(self._memory.stats.running, 1)
        seqs = max(1, min(self._budget.max_num_seqs, most) // 2)
        self._budget = Budget(seqs, max(seqs, self._budget.max_num_batched_tokens // 2))
        return self._budget

    def settle(self, plan: Plan) -> None:
        """Put back what memory did not admit, and what it preempted, at the front."""
        if plan.deferred:
            self.queue.push_front(plan.deferred)
        if plan.preempted:
            self.queue.push_front(reversed(plan.preempted))

    def _admissions(self, left: int, num_running: int) -> list[Join]:
        room = min(self._budget.max_num_seqs, self._budget.max_num_batched_tokens) - num_running
        joins: list[Join] = []
        passed_over: list[Sequence] = []
        claimed: dict[Key, None] = {}  # blocks that the rows admitted in this step will compute
        if room <= 0:
            return joins
        fits = _FutureFit(self._memory, self.forecast, self._watermark)
        for seq in self.queue.take():
            probe = self._memory.probe(seq)
            cached = probe.num_blocks * self._memory.block_size
            if probe.pending or probe.missing in claimed:  # its prefix is being computed: in the next step it costs nothing
                passed_over.append(seq)
                if len(passed_over) >= MAX_PASSED_OVER:
                    break
                continue
            todo = len(seq.request.prompt_ids) + len(seq.output_ids) - cached
            grant = self._chunks.grant(todo, left, not num_running and not joins)
            alone = not num_running and not joins
            if grant <= 0 or not (fits.admit(seq, cached) or alone):
                passed_over.append(seq)
                break
            joins.append(Join(seq, grant))
            if probe.missing is not None:
                claimed[probe.missing] = None
            left -= grant
            room -= 1
            if left <= 0 or room <= 0:
                break
        if passed_over:
            self.queue.push_front(passed_over)
        return joins


class _FutureFit:
    """Whether one more row fits beside the running ones at their worst future moment. Lives for one step."""

    def __init__(self, memory: KVMemory, forecast: OutputForecast, watermark: int) -> None:
        self._memory = memory
        self._forecast = forecast
        self._capacity = (memory.pool.num_blocks - 1 - watermark) * memory.block_size
        self._held: np.ndarray | None = None
        self._rest = np.empty(0, np.int64)
        self._bound = 0

    def _load(self) -> None:
        """Gather the running rows; block rounding counts as if every row held a full last block."""
        table, size = self._memory.table, self._memory.block_size
        slots = table.running()
        tokens = table.num_tokens[slots].astype(np.int64)
        produced = tokens - table.num_prompt[slots]
        rest = np.maximum(table.limit[slots] - tokens, 0)
        self._rest = self._forecast.expected(rest, produced, table.ignore_eos[slots])
        self._held = tokens - table.num_cached[slots] + size
        self._bound = int((self._held + self._rest).sum())

    def admit(self, seq: Sequence, cached: int) -> bool:
        """True when the row fits, which then counts as running for the rest of the step."""
        if self._held is None:
            self._load()
        assert self._held is not None
        size = self._memory.block_size
        tokens = len(seq.request.prompt_ids) + len(seq.output_ids)
        exact = np.array([seq.request.params.ignore_eos])
        rest = int(self._forecast.expected(np.array([seq.limit - tokens]), np.array([len(seq.output_ids)]), exact)[0])
        held = tokens - cached + size
        if self._bound + held + rest > self._capacity:  # not even together at their ends: look closer
            peak = peak_tokens(np.append(self._held, held), np.append(self._rest, max(rest, 0)))
            if peak > self._capacity:
                return False
        self._held = np.append(self._held, held)
        self._rest = np.append(self._rest, max(rest, 0))
        self._bound += held + rest
        return True
