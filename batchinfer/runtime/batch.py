"""From a plan to one ragged batch: which tokens at which positions, where their KV goes, which rows are sampled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchinfer.attention.base import AttnInputs
from batchinfer.core.logprobs import NO_PLACES, NoScores, ScoredPlaces, Scores
from batchinfer.core.plan import Drafts, Plan
from batchinfer.core.sequences import SequenceTable


@dataclass(slots=True)
class StepBatch:
    """What the model and the head need of one step. A span that samples has a logit row for every token that it may get."""

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    attn: AttnInputs
    logit_rows: Tensor  # int64 [R + P], rows of the batch whose next token is sampled, and those that score prompt tokens
    sampling_slots: np.ndarray  # int64 [R]
    fill_positions: np.ndarray  # int64 [R], place in the sequence that each sampled token would take
    num_drafts: np.ndarray  # int32, of each sampling span: its logit rows less one
    draft_ids: np.ndarray  # int32, the drafts of all spans
    scored: ScoredPlaces = NO_PLACES  # prompt tokens whose logits follow those of the sampled rows


class RaggedBatchBuilder:
    """Builds batches from the columns, with a fixed number of vector operations."""

    def __init__(self, table: SequenceTable, block_size: int, device: torch.device, scores: Scores | None = None) -> None:
        self._table = table
        self._block_size = block_size
        self._device = device
        self._scores = scores or NoScores()

    def build(self, plan: Plan, drafts: Drafts) -> StepBatch:
        """One row per token of every span and of its drafts, spans in the plan's order."""
        table, size = self._table, self._block_size
        counts = plan.num_tokens
        if len(drafts.token_ids):
            self._write(plan, drafts)
            counts = counts + drafts.counts
        if len(counts) == int(counts.sum()):  # one token each
            starts = np.arange(len(counts) + 1)
            slots, positions = plan.slots, plan.start.astype(np.int64)
        else:
            starts = np.zeros(len(counts) + 1, np.int64)
            np.cumsum(counts, out=starts[1:])
            slots = np.repeat(plan.slots, counts)
            positions = np.arange(starts[-1]) + np.repeat(plan.start - starts[:-1], counts)
        input_ids = _take(table.tokens, slots, positions)
        index = positions // size
        blocks = _take(table.block_table, slots, index)
        attn = AttnInputs(
            query_start=starts,
            start=plan.start,
            num_tokens=counts,
            slots=plan.slots,
            block_table=table.block_table,
            write_block=blocks,
            write_offset=positions - index * size,
        )
        num_drafts = drafts.counts[plan.samples]
        rows = _sampled_rows(starts[1:][plan.samples], num_drafts)
        scored = self._scores.prompt_places(plan, starts[:-1])
        return StepBatch(
            input_ids=self._to_device(input_ids),
            positions=self._to_device(positions),
            attn=attn,
            logit_rows=self._to_device(np.concatenate((rows, scored.rows)) if len(scored.rows) else rows),
            sampling_slots=slots[rows],
            fill_positions=positions[rows] + 1,
            num_drafts=num_drafts,
            draft_ids=drafts.token_ids,
            scored=scored,
        )

    def _write(self, plan: Plan, drafts: Drafts) -> None:
        """Put drafts behind their rows' tokens, where those would come; `num_tokens` does not count them."""
        counts = drafts.counts
        ends = np.cumsum(counts)
        at = (plan.start + plan.num_tokens)[counts > 0]
        offset = np.arange(len(drafts.token_ids)) - np.repeat((ends - counts)[counts > 0], counts[counts > 0])
        self._table.tokens[np.repeat(plan.slots, counts), np.repeat(at, counts[counts > 0]) + offset] = drafts.token_ids

    def _to_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)


def _sampled_rows(ends: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """The last token of each span and its drafts: int64 rows of the batch. `ends`: the row after each span's last draft."""
    if not len(drafts) or not drafts.max():
        return ends - 1
    counts = drafts + 1
    first = np.cumsum(counts) - counts
    rows: np.ndarray = np.repeat(ends - counts - first, counts) + np.arange(int(counts.sum()))
    return rows


def _take(matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """matrix[rows, columns] as int64."""
    flat: np.ndarray = matrix.reshape(-1).take(rows * matrix.shape[1] + columns, mode="clip")
    return flat.astype(np.int64)
