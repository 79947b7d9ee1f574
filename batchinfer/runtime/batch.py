"""From a plan to one ragged batch: which tokens at which positions, where their KV goes, which rows are sampled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchinfer.attention.base import AttnInputs
from batchinfer.core.plan import Drafts, Plan
from batchinfer.core.sequences import SequenceTable


@dataclass(slots=True)
class StepBatch:
    """What the model and the head need of one step."""

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    attn: AttnInputs
    logit_rows: Tensor  # int64 [R], rows of the batch whose next token is sampled
    sampling_slots: np.ndarray  # int32 [R]


class RaggedBatchBuilder:
    """Builds batches from the columns, with a fixed number of vector operations."""

    def __init__(self, table: SequenceTable, block_size: int, device: torch.device) -> None:
        self._table = table
        self._block_size = block_size
        self._device = device

    def build(self, plan: Plan, drafts: Drafts) -> StepBatch:
        """One row per token of every span, spans in the plan's order."""
        table, size = self._table, self._block_size
        counts = plan.num_tokens
        starts = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        if len(counts) == starts[-1]:  # one token each
            slots, positions = plan.slots, plan.start.astype(np.int64)
        else:
            slots = np.repeat(plan.slots, counts)
            positions = np.arange(starts[-1]) + np.repeat(plan.start - starts[:-1], counts)
        input_ids = _take(table.tokens, slots, positions)
        blocks = _take(table.block_table, slots, positions // size)
        attn = AttnInputs(
            query_start=starts,
            start=plan.start,
            num_tokens=counts,
            slots=plan.slots,
            block_table=table.block_table,
            write_block=blocks,
            write_offset=positions % size,
        )
        last_rows = starts[1:][plan.samples] - 1
        return StepBatch(self._to_device(input_ids), self._to_device(positions), attn, self._to_device(last_rows), plan.slots[plan.samples])

    def _to_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)


def _take(matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """matrix[rows, columns] as int64."""
    flat: np.ndarray = matrix.reshape(-1).take(rows.astype(np.int64) * matrix.shape[1] + columns, mode="clip")
    return flat.astype(np.int64)
