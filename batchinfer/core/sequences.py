"""Rows inside the engine: one small object each, and their hot state in NumPy columns indexed by slot.

A steady decode step touches only the columns, with a fixed number of vector operations; Python visits a sequence
only when it joins, is preempted or ends. There are no phases: the work left is `num_tokens - num_computed`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from batchinfer.core.request import Request

Int32s = np.ndarray  # int32 [n]
Slots = np.ndarray  # int64 [n]: NumPy's own index type, since any other is converted anew by every look-up
_NO_TOKENS = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Sequence:
    """What the engine knows of one unfinished row beyond the columns."""

    seq_id: int  # dense, in order of arrival
    request: Request
    limit: int  # total tokens at which it ends with `length`
    clipped: bool  # limit is smaller than prompt + max_tokens
    choice: int = 0  # which of the row's answers it is
    slot: int = -1  # row of the columns while running
    output_ids: np.ndarray = field(default_factory=lambda: _NO_TOKENS)  # kept here only while not running
    num_cached: int = 0
    num_preemptions: int = 0
    admitted: bool = False  # counted in the statistics already
    chain: int = 0  # prefix-cache serial of the last block known to the cache
    pending_key: tuple[int, bytes] | None = None  # the block it computes for others that wait

    def token_ids(self) -> np.ndarray:
        """Prompt and generated tokens, int32; valid while not running."""
        return np.concatenate((self.request.prompt_ids, self.output_ids)) if len(self.output_ids) else self.request.prompt_ids


class SequenceTable:
    """Columns of the running sequences.

    Invariants: `running()` lists occupied slots, oldest admission first; `num_computed < num_tokens` between steps;
    `block_table[slot, :num_blocks[slot]]` are the slot's blocks, the rest of the row is the null block 0.
    """

    def __init__(self, num_slots: int, max_tokens: int, max_blocks: int) -> None:
        self.num_slots = num_slots
        self.tokens = np.zeros((num_slots, max_tokens + 1), np.int32)  # zero pages cost nothing until touched
        self.block_table = np.zeros((num_slots, max_blocks), np.int32)
        self.num_tokens = np.zeros(num_slots, np.int32)
        self.num_computed = np.zeros(num_slots, np.int32)
        self.num_filled = self.num_computed  # leading tokens whose KV every model of the engine has: a draft model has its own column
        self.num_prompt = np.zeros(num_slots, np.int32)
        self.num_blocks = np.zeros(num_slots, np.int32)
        self.published = np.zeros(num_slots, np.int32)  # leading blocks offered to the prefix cache
        self.num_cached = np.zeros(num_slots, np.int32)  # tokens whose blocks came from the prefix cache
        self.limit = np.zeros(num_slots, np.int32)
        self.min_end = np.zeros(num_slots, np.int32)  # total tokens before which nothing but the limit ends it
        self.watch = np.zeros(num_slots, np.int32)  # stop watcher of the row, 0 for none (core/stop.py)
        self.ignore_eos = np.zeros(num_slots, bool)
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int32)
        self.seed = np.zeros(num_slots, np.uint64)
        self.row = np.zeros(num_slots, np.int64)  # `Request.row`
        self.choice = np.zeros(num_slots, np.int32)  # which of the row's answers
        self.sequences: list[Sequence | None] = [None] * num_slots
        self._running = np.zeros(num_slots, np.int64)
        self._num_running = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._row = self.tokens.shape[1]
        self._flat_tokens = self.tokens.reshape(-1)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return self._num_running

    def running(self) -> Slots:
        """Occupied slots, oldest admission first; a view that the next admit or remove changes."""
        return self._running[: self._num_running]

    def admit(self, seq: Sequence, seed: int) -> int:
        """Give the sequence a slot and fill its columns; blocks and `num_computed` are the caller's."""
        slot = self._free.pop()
        request, params = seq.request, seq.request.params
        num_prompt = len(request.prompt_ids)
        num_tokens = num_prompt + len(seq.output_ids)
        row = self.tokens[slot]
        row[:num_prompt] = request.prompt_ids
        row[num_prompt:num_tokens] = seq.output_ids
        self.num_tokens[slot] = num_tokens
        self.num_prompt[slot] = num_prompt
        self.limit[slot] = seq.limit
        self.min_end[slot] = min(num_prompt + params.min_tokens, seq.limit)  # nothing outlives the limit
        self.ignore_eos[slot] = params.ignore_eos
        self.temperature[slot] = 0.0 if params.greedy else params.temperature
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.top_k[slot] = params.top_k
        self.seed[slot] = seed
        self.row[slot] = request.row
        self.choice[slot] = seq.choice
        self.sequences[slot] = seq
        self._running[self._num_running] = slot
        self._num_running += 1
        seq.slot = slot
        seq.output_ids = _NO_TOKENS
        return slot

    def remove(self, slots: Slots) -> None:
        """Take sequences out of the running list and free their slots; blocks must be released already."""
        gone = np.zeros(self.num_slots, bool)
        gone[slots] = True
        running = self.running()
        kept = running[~gone[running]]
        self._running[: len(kept)] = kept
        self._num_running = len(kept)
        for slot in slots.tolist():
            seq = self.sequences[slot]
            assert seq is not None
            seq.slot = -1
            self.sequences[slot] = None
            self._free.append(slot)
        self.watch[slots] = 0

    def append(self, slots: Slots, token_ids: Int32s) -> None:
        """Add one token to each of the (distinct) slots."""
        ends = self.num_tokens[slots]
        self._flat_tokens[slots * self._row + ends] = token_ids
        self.num_tokens[slots] = ends + 1

    def output_of(self, slot: int) -> np.ndarray:
        """Copy of the tokens generated so far, int32."""
        return self.tokens[slot, self.num_prompt[slot] : self.num_tokens[slot]].copy()
