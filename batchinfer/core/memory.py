"""KV memory: who holds which blocks. Mechanism only; who deserves them is the scheduler's.

`reserve` turns a schedule into a plan: running sequences get the blocks that their span needs, at the cost of those
admitted last when the pool is short (preemption by recompute), then waiting ones match the prefix cache and enter.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from batchinfer.core.block_pool import KVPool
from batchinfer.core.forks import Forks, NoForks
from batchinfer.core.plan import Join, Plan, Schedule
from batchinfer.core.prefix_cache import PrefixCache, Probe
from batchinfer.core.seeds import choice_seed, row_seed
from batchinfer.core.sequences import Sequence, SequenceTable
from batchinfer.core.stats import RunStats

_EMPTY = np.empty(0, np.int64)


class Lifecycle(Protocol):
    """Features that keep state of their own per running row."""

    def admit(self, seq: Sequence) -> None:
        """The sequence has just been given a slot."""

    def forget(self, slots: np.ndarray) -> None:
        """These slots are about to be freed."""


class KVMemory:
    """The only owner of block tables, reference counts and `num_computed` before the forward pass."""

    def __init__(
        self, table: SequenceTable, pool: KVPool, prefix: PrefixCache, block_size: int, job_seed: int, listeners: tuple[Lifecycle, ...]
    ) -> None:
        self.table = table
        self.pool = pool
        self.prefix = prefix
        self.block_size = block_size
        self._job_seed = job_seed
        self._listeners = listeners
        self.forks: Forks = NoForks()  # set once, when the engine is built, as is
        self.lookahead = 0  # tokens of drafts to make room for
        self._copies: list[tuple[int, int]] = []
        self.stats = RunStats(blocks_total=pool.num_blocks - 1)

    def reserve(self, schedule: Schedule) -> Plan:
        """Give every scheduled sequence its blocks, or leave it out: preempted, deferred, or without a span."""
        slots, grants = schedule.slots, schedule.num_tokens
        granted = grants > 0
        if not granted.all():
            slots, grants = slots[granted], grants[granted]
        start = self.table.num_computed[slots]
        needed = np.maximum(self._blocks_for(start + grants) - self.table.num_blocks[slots], 0)  # a row may have more than it needs now
        preempted: list[Sequence] = []
        if int(needed.sum()) <= self.pool.num_free:
            self._grow(slots, needed)
            deferred = self._join_all(schedule.joins)
        else:
            kept = self._grow_by_preemption(slots, needed, schedule.slots, preempted)
            slots, grants, start = slots[kept], grants[kept], start[kept]
            deferred = [join.seq for join in schedule.joins]
        joined = [join for join in schedule.joins if join.seq.slot >= 0]
        if joined:
            new = np.array([join.seq.slot for join in joined], np.int64)
            new_start = self.table.num_computed[new]
            caps = np.array([join.num_tokens for join in joined], np.int32)
            slots = np.concatenate((slots, new))
            start = np.concatenate((start, new_start))
            grants = np.concatenate((grants, np.minimum(caps, self.table.num_tokens[new] - new_start)))
        samples = start + grants == self.table.num_tokens[slots]
        self._count_use()
        self._look_ahead(slots[samples])
        copies, self._copies = self._copies, []
        return Plan(slots, start, grants, samples, len(joined), preempted, deferred, copies)

    def publish(self, plan: Plan) -> None:
        """Offer the prompt blocks that this step filled to later rows.

        Blocks of generated tokens are offered only when their row is preempted: an offline job asks for no prompt
        that continues another row's answer.
        """
        slots = plan.slots
        table = self.table
        full = np.minimum(table.num_filled[slots], table.num_prompt[slots]) // self.block_size
        fresh = full > table.published[slots]
        for slot, num_full in zip(slots[fresh].tolist(), full[fresh].tolist(), strict=True):
            self._publish(slot, num_full)

    def release(self, slots: np.ndarray) -> None:
        """Take back the blocks and slots of sequences that end or are preempted."""
        if not len(slots):
            return
        table = self.table
        for listener in self._listeners:
            listener.forget(slots)
        for slot in slots.tolist():
            seq = table.sequences[slot]
            assert seq is not None
            self.prefix.withdraw(seq)
        self.give_back(slots)
        table.remove(slots)

    def give_back(self, slots: np.ndarray) -> None:
        """Take back the blocks of sequences, which may run on."""
        table = self.table
        held = [table.block_table[slot, : table.num_blocks[slot]][::-1] for slot in slots.tolist()]
        self.pool.release(np.concatenate(held, dtype=np.int64) if held else _EMPTY)
        table.block_table[slots] = 0
        table.num_blocks[slots] = 0

    def discard(self, slots: np.ndarray) -> np.ndarray:
        """Release sequences whose KV may be damaged; returns the blocks that must be cleared before they are used again."""
        table = self.table
        held = np.unique(np.concatenate([table.block_table[slot, : table.num_blocks[slot]] for slot in slots.tolist()], dtype=np.int64))
        self.release(slots)
        return self.pool.discard(held)

    def probe(self, seq: Sequence) -> Probe:
        """What the prefix cache could give the sequence now; changes nothing."""
        return self.prefix.probe(seq)

    def check(self) -> None:
        """Assert every invariant of pool, tables and prefix cache; tests call it after each step."""
        table = self.table
        running = table.running()
        assert len(np.unique(running)) == len(running)
        held = [table.block_table[slot, : table.num_blocks[slot]] for slot in running]
        self.pool.check(np.concatenate(held) if held else _EMPTY)
        for slot in running.tolist():
            assert table.num_blocks[slot] >= self._blocks_for(table.num_computed[slot])
            assert table.published[slot] * self.block_size <= table.num_computed[slot], "a block is offered before it is full"
            assert not table.block_table[slot, table.num_blocks[slot] :].any()
            assert table.num_computed[slot] < table.num_tokens[slot] <= table.limit[slot]
        idle = np.setdiff1d(np.arange(table.num_slots), running)
        assert not table.num_blocks[idle].any()
        assert not table.block_table[idle].any()
        self.prefix.check()

    def _blocks_for(self, num_tokens: np.ndarray) -> np.ndarray:
        return (num_tokens + self.block_size - 1) // self.block_size

    def _grow(self, slots: np.ndarray, needed: np.ndarray) -> None:
        """Append `needed[i]` fresh blocks to each slot's table, in one allocation."""
        wants = np.flatnonzero(needed)
        if not len(wants):
            return
        table = self.table
        who, count = slots[wants], needed[wants]
        total = int(count.sum())
        ids = self.pool.try_allocate(total)
        assert ids is not None, "counted free blocks are missing"
        at = table.num_blocks[who]
        if total == len(who):  # one each: the steady case
            table.block_table[who, at] = ids
        else:
            ends = np.cumsum(count)
            offset = np.arange(total) - np.repeat(ends - count, count)
            table.block_table[np.repeat(who, count), np.repeat(at, count) + offset] = ids
        table.num_blocks[who] = at + count

    def _look_ahead(self, slots: np.ndarray) -> None:
        """Give sampling sequences room for drafts, where that takes nothing from anybody: drafts are cut to the room there is."""
        if not self.lookahead:
            return
        table = self.table
        ends = np.minimum(table.num_tokens[slots] + self.lookahead, table.limit[slots])
        needed = np.maximum(self._blocks_for(ends) - table.num_blocks[slots], 0)
        if int(needed.sum()) <= self.pool.num_free // 2:
            self._grow(slots, needed)

    def _grow_by_preemption(self, slots: np.ndarray, needed: np.ndarray, order: np.ndarray, preempted: list[Sequence]) -> np.ndarray:
        """Serve sequences in order; when the pool is short, the last admitted without a span gives way.

        Returns the mask of slots that have their blocks. The first sequence always gets them, since no sequence is
        admitted that could outgrow the pool alone.
        """
        kept = np.zeros(len(slots), bool)
        gone: set[int] = set()  # membership only, never iterated
        served: set[int] = set()
        victims = order.tolist()
        for index, slot in enumerate(slots.tolist()):
            if slot in gone:
                continue
            count = int(needed[index])
            while count > self.pool.num_free and victims:
                victim = victims[-1]
                if victim == slot or victim in served:
                    break
                victims.pop()
                gone.add(victim)
                preempted.append(self._preempt(victim))
            if count > self.pool.num_free:
                continue
            self._grow(slots[index : index + 1], needed[index : index + 1])
            served.add(slot)
            kept[index] = True
        return kept

    def _preempt(self, slot: int) -> Sequence:
        table = self.table
        seq = table.sequences[slot]
        assert seq is not None
        self._publish(slot, int(min(table.num_filled[slot], table.num_computed[slot])) // self.block_size)
        seq.output_ids = table.output_of(slot)
        seq.num_preemptions += 1
        self.stats.preemptions += 1
        outputs = seq.output_ids
        self.release(np.array([slot], np.int64))
        seq.output_ids = outputs
        return seq

    def _publish(self, slot: int, num_full: int) -> None:
        table = self.table
        first = int(table.published[slot])
        if num_full <= first:
            return
        seq = table.sequences[slot]
        assert seq is not None
        tokens = table.tokens[slot, first * self.block_size : num_full * self.block_size]
        self.prefix.publish(seq, table.block_table[slot, first:num_full], first, tokens)
        table.published[slot] = num_full

    def _join_all(self, joins: list[Join]) -> list[Sequence]:
        """Admit in order until one does not fit; return those left out."""
        for index, join in enumerate(joins):
            if not self._try_join(join):
                return [late.seq for late in joins[index:]]
        return []

    def _try_join(self, join: Join) -> bool:
        seq, table = join.seq, self.table
        cached = self.prefix.match(seq)
        self.pool.share(cached)
        source = self.forks.try_source(seq, len(cached))
        start = len(cached) * self.block_size if source is None else len(seq.request.prompt_ids) - 1
        num_tokens = len(seq.request.prompt_ids) + len(seq.output_ids)
        fresh = -(-(start + min(join.num_tokens, num_tokens - start)) // self.block_size) - len(cached)
        fresh = self.pool.reservation(fresh)
        ids = self.pool.try_allocate(fresh)
        if ids is None:
            self.prefix.withdraw(seq)
            self.pool.release(cached[::-1])
            return False
        if source is not None:
            self._copies.append((source, int(ids[0])))
        slot = table.admit(seq, choice_seed(row_seed(seq.request.params.seed, self._job_seed, seq.request.row), seq.choice))
        table.block_table[slot, : len(cached)] = cached
        table.block_table[slot, len(cached) : len(cached) + fresh] = ids
        table.num_blocks[slot] = len(cached) + fresh
        table.num_computed[slot] = table.num_cached[slot] = start
        table.published[slot] = len(cached)
        self._count_admission(seq, start)
        for listener in self._listeners:
            listener.admit(seq)
        return True

    def _count_admission(self, seq: Sequence, cached_tokens: int) -> None:
        stats = self.stats
        if seq.admitted:
            stats.recomputed_tokens += max(0, int(self.table.num_tokens[seq.slot]) - 1 - cached_tokens)
            return
        seq.admitted = True
        seq.num_cached = cached_tokens
        stats.prompt_tokens += len(seq.request.prompt_ids)
        stats.cached_prompt_tokens += cached_tokens

    def _count_use(self) -> None:
        stats = self.stats
        stats.running = self.table.num_running
        stats.blocks_used = self.pool.num_used
        stats.peak_running = max(stats.peak_running, stats.running)
        stats.peak_blocks_used = max(stats.peak_blocks_used, stats.blocks_used)
