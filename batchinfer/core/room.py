"""Whether one more row fits into KV memory, now and until the rows end."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from batchinfer.core.forecast import OutputForecast, peak_tokens
from batchinfer.core.memory import KVMemory
from batchinfer.core.prefix_cache import Probe
from batchinfer.core.sequences import Sequence


class Room(Protocol):
    """The judgement of one step; made anew for each, from the memory and the forecast."""

    def admit(self, seq: Sequence, probe: Probe) -> bool:
        """True when the row fits, which then counts as running for the rest of the step."""


class ForecastRoom:
    """Whether one more row fits beside the running ones at their worst future moment. Lives for one step.

    Blocks that several rows hold are counted once, and as staying; a row's last block counts as full. A few blocks are
    kept out of admission, so that a wrong forecast rarely ends in preemption.
    """

    def __init__(self, memory: KVMemory, forecast: OutputForecast) -> None:
        self._memory = memory
        self._forecast = forecast
        watermark = max(1, memory.pool.num_blocks // 100)
        self._capacity = (memory.pool.num_blocks - 1 - watermark) * memory.block_size
        table, size = memory.table, memory.block_size
        slots = table.running()
        tokens = table.num_tokens[slots]
        rest = np.maximum(table.limit[slots] - tokens, 0)
        self._rest = forecast.expected(rest, tokens - table.num_prompt[slots], table.ignore_eos[slots])
        # What is not computed yet of a prompt is still to be allocated; and a last block.
        self._grow = np.maximum(tokens - table.num_blocks[slots] * size, 0) + size
        self._bound = memory.pool.num_used * size + int(self._grow.sum() + self._rest.sum())
        self._joined: list[tuple[int, int]] = []  # (tokens to hold, tokens to come) of rows admitted in this step

    def admit(self, seq: Sequence, probe: Probe) -> bool:
        """True when the row fits, which then counts as running for the rest of the step."""
        size = self._memory.block_size
        tokens = len(seq.request.prompt_ids) + len(seq.output_ids)
        rest = self._forecast.expected_of_one(seq.limit - tokens, len(seq.output_ids), seq.request.params.ignore_eos)
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


class FreeSlabs:
    """Memory that is not paged: a row fits where a slab is free, and never grows out of it."""

    def __init__(self, memory: KVMemory, forecast: OutputForecast) -> None:
        self._left = memory.pool.num_free // memory.pool.reservation(1)

    def admit(self, seq: Sequence, probe: Probe) -> bool:
        """One slab less."""
        self._left -= 1
        return self._left >= 0


class NothingHeld:
    """Without a KV cache running rows hold no memory between steps, so it limits none."""

    def __init__(self, memory: KVMemory, forecast: OutputForecast) -> None:
        pass

    def admit(self, seq: Sequence, probe: Probe) -> bool:
        """Always."""
        return True
