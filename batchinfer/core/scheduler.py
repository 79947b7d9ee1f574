"""Who runs in this step, with how many tokens. Policy only: it allocates nothing and reads the clock never."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from batchinfer.core.batching import Batching
from batchinfer.core.forecast import OutputForecast
from batchinfer.core.memory import KVMemory
from batchinfer.core.order import WaitingQueue
from batchinfer.core.plan import Join, Plan, Schedule
from batchinfer.core.prefix_cache import Key
from batchinfer.core.room import Room
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
        if int(todo.sum()) <= budget:
            return todo
        before = np.cumsum(todo) - todo
        grants: np.ndarray = np.minimum(np.maximum(budget - before, 0), todo)
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


@dataclass(frozen=True, slots=True)
class Policies:
    """How prompts are cut, when rows may join, and how memory for them is judged."""

    chunks: ChunkPolicy
    batching: Batching
    room: Callable[[KVMemory, OutputForecast], Room]


class Scheduler:
    """Running rows first, oldest admission first; then waiting rows while budget, slots and forecast memory last."""

    def __init__(self, memory: KVMemory, queue: WaitingQueue, budget: Budget, policies: Policies) -> None:
        self.queue = queue
        self.forecast = OutputForecast()
        self._memory = memory
        self._table = memory.table
        self._budget = self._asked = budget
        self._good_steps = 0
        self._chunks = policies.chunks
        self._batching = policies.batching
        self._room = policies.room

    @property
    def num_waiting(self) -> int:
        """Rows not running."""
        return len(self.queue)

    def schedule(self) -> Schedule:
        """Spend the step's budget."""
        table = self._table
        slots = table.running().copy()
        todo = table.num_tokens[slots] - table.num_computed[slots]
        todo[self._budget.max_num_seqs :] = 0  # only after memory ran out
        left = self._budget.max_num_batched_tokens - len(slots)
        if left >= 0 and int(todo.max(initial=0)) <= 1:  # every running row decodes
            grants = todo
        else:
            grants = self._chunks.share(todo, self._budget.max_num_batched_tokens)
            left = self._budget.max_num_batched_tokens - int(grants.sum())
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
        if plan.deferred or plan.preempted or not len(self.queue):
            self._batching.filled()

    def _admissions(self, left: int, num_running: int) -> list[Join]:
        room = self._batching.room(min(self._budget.max_num_seqs, self._budget.max_num_batched_tokens), num_running)
        joins: list[Join] = []
        passed_over: list[Sequence] = []
        claimed: dict[Key, None] = {}  # blocks that the rows admitted in this step will compute
        begun: dict[int, None] = {}  # rows with several answers of which the first enters in this step
        if room <= 0:
            return joins
        fits = self._room(self._memory, self.forecast)
        for seq in self.queue.take():
            probe, first = self._memory.probe(seq), seq.seq_id - seq.choice
            cached = probe.num_blocks * self._memory.block_size
            if (
                probe.pending or probe.missing in claimed or first in begun or self._memory.forks.is_pending(seq)
            ):  # its prefix is being computed: in the next step it costs nothing
                passed_over.append(seq)
                if len(passed_over) >= MAX_PASSED_OVER:
                    break
                continue
            todo = len(seq.request.prompt_ids) + len(seq.output_ids) - cached
            alone = not num_running and not joins
            grant = self._chunks.grant(todo, left, alone)
            if grant <= 0 or not (fits.admit(seq, probe) or alone):
                passed_over.append(seq)
                if grant > 0:
                    self._batching.filled()
                break
            joins.append(Join(seq, grant))
            if seq.request.params.n > 1 and self._memory.forks.try_source(seq, probe.num_blocks) is None:
                begun[first] = None
            if probe.missing is not None:
                claimed[probe.missing] = None
            left -= grant
            room -= 1
            if left <= 0 or room <= 0:
                break
        if passed_over:
            self.queue.push_front(passed_over)
        return joins
