"""Who runs in this step, with how many tokens. Policy only: it allocates nothing and reads the clock never."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from batchinfer.core.forecast import OutputForecast, peak_tokens
from batchinfer.core.memory import KVMemory
from batchinfer.core.order import WaitingQueue
from batchinfer.core.plan import Join, Plan, Schedule
from batchinfer.core.prefix_cache import Key, Probe
from batchinfer.core.sequences import Sequence

RECOVERY_STEPS = 256  # good steps after which a budget that memory shrank is tried larger
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
        self._budget = self._asked = budget
        self._good_steps = 0
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
        if len(slots) > self._budget.max_num_seqs:  # only after memory ran out
            grants[self._budget.max_num_seqs :] = 0
        joins = self._admissions(left, len(slots)) if left > 0 and len(self.queue) else []
        return Schedule(slots, grants, joins)

    def shrink(self, num_spans: int, num_tokens: int) -> Budget:
        """Compute less in a step than the one that ran out of memory did; returns the new budget."""
        seqs = max(1, num_spans // 2) if num_spans > 1 else self._budget.max_num_seqs
        self._budget = Budget(min(seqs, self._budget.max_num_seqs), max(1, num_tokens // 2))
        self._good_steps = 0
        return self._budget

    def recover(self) -> None:
        """A step went well: after many in a row, what was shrunk is doubled again, up to what was asked for."""
        if self._budget == self._asked:
            return
        self._good_steps += 1
        if self._good_steps >= RECOVERY_STEPS:
            self._good_steps = 0
            self._budget = Budget(
                min(2 * self._budget.max_num_seqs, self._asked.max_num_seqs),
                min(2 * self._budget.max_num_batched_tokens, self._asked.max_num_batched_tokens),
            )

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
            if grant <= 0 or not (fits.admit(seq, probe) or alone):
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
    """Whether one more row fits beside the running ones at their worst future moment. Lives for one step.

    Blocks that several rows hold are counted once, and as staying; a row's last block counts as full.
    """

    def __init__(self, memory: KVMemory, forecast: OutputForecast, watermark: int) -> None:
        self._memory = memory
        self._forecast = forecast
        self._capacity = (memory.pool.num_blocks - 1 - watermark) * memory.block_size
        table, size = memory.table, memory.block_size
        slots = table.running()
        tokens = table.num_tokens[slots].astype(np.int64)
        rest = np.maximum(table.limit[slots] - tokens, 0)
        self._rest = forecast.expected(rest, tokens - table.num_prompt[slots], table.ignore_eos[slots])
        # What is not computed yet of a prompt is still to be allocated; and a last block.
        self._grow = np.maximum(tokens - table.num_blocks[slots].astype(np.int64) * size, 0) + size
        self._bound = memory.pool.num_used * size + int(self._grow.sum() + self._rest.sum())
        self._joined: list[tuple[int, int]] = []  # (tokens to hold, tokens to come) of rows admitted in this step

    def admit(self, seq: Sequence, probe: Probe) -> bool:
        """True when the row fits, which then counts as running for the rest of the step."""
        size = self._memory.block_size
        tokens = len(seq.request.prompt_ids) + len(seq.output_ids)
        exact = np.array([seq.request.params.ignore_eos])
        rest = int(self._forecast.expected(np.array([seq.limit - tokens]), np.array([len(seq.output_ids)]), exact)[0])
        held = tokens - probe.num_in_use * size + size
        if self._bound + held + rest > self._capacity and self._peak(held, max(rest, 0)) > self._capacity:
            return False
        self._bound += held + rest
        self._joined.append((held, max(rest, 0)))
        return True

    def _peak(self, held: int, rest: int) -> int:
        """Tokens held at the worst moment, with a further row: not all rows are at their ends at once."""
        memory, size = self._memory, self._memory.block_size
        slots = memory.table.running()
        used = memory.table.block_table[slots, : int(memory.table.num_blocks[slots].max(initial=0))]
        own = np.count_nonzero((used > 0) & (memory.pool.refs[used] == 1), axis=1) * size
        shared = memory.pool.num_used * size - int(own.sum())
        more = np.array([*self._joined, (held, rest)], np.int64)
        peak = peak_tokens(np.concatenate((own + self._grow, more[:, 0])), np.concatenate((self._rest, more[:, 1])))
        return shared + peak
