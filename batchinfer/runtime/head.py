"""From hidden states to the step's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import torch

from batchinfer.core.plan import StepResult
from batchinfer.core.request import RowError, SamplingParams
from batchinfer.core.sequences import SequenceTable
from batchinfer.core.vocabulary import Vocabulary
from batchinfer.layers.lm_head import LmHead
from batchinfer.ops.draw import Drawn, Sampler, SamplingColumns, max_kept
from batchinfer.ops.rows import Entry, QuantRows
from batchinfer.runtime.batch import StepBatch
from batchinfer.runtime.logits import Ban, LogitEdit, NoEdit
from batchinfer.runtime.sampler import gather_columns

MOST_ROWS = 256  # in one pass over the vocabulary: more make no product faster
NOT_FINITE = RowError("non_finite_logits", "the model's logits for this row are NaN or infinite; try --dtype float32")


class GenerateHead:
    """The LM head and the sampler: each slice of the vocabulary is consumed as it is computed."""

    def __init__(
        self,
        lm_head: LmHead,
        table: SequenceTable,
        vocabulary: Vocabulary,
        stop_ids: Callable[[SamplingParams], tuple[int, ...]],
        sampler: Sampler,
    ) -> None:
        self.lm_head = lm_head
        self._table = table
        # The model's table may be wider than the tokenizer (padding): those ids are never sampled.
        self._vocab_size = vocabulary.size
        self._eos_ids = [i for i in vocabulary.eos_ids if i < vocabulary.size]
        self._stop_ids = stop_ids
        self._sampler = sampler

    @torch.inference_mode()
    def decide(self, hidden: Entry, batch: StepBatch) -> StepResult:
        """hidden [R, H] -> one token per row, int32 [R] on the host."""
        slots = batch.sampling_slots
        columns = gather_columns(self._table, slots, self._vocab_size)
        token_ids, sound = np.zeros(len(slots), np.int32), np.ones(len(slots), bool)
        for part in _parts(columns, self._vocab_size):
            drawn = self._draw(_rows(hidden, part), slots[part], columns.part(part))
            token_ids[part], sound[part] = drawn.token_ids, drawn.sound
        return StepResult(token_ids, {int(slot): NOT_FINITE for slot in slots[~sound]})

    def _draw(self, hidden: Entry, slots: np.ndarray, columns: SamplingColumns) -> Drawn:
        draw, edit = self._sampler.begin(columns), self._edit(slots)
        for first_id, logits in self.lm_head.slices(hidden, self._vocab_size):
            draw.take(first_id, edit.apply(first_id, logits))
        return draw.finish()

    def _edit(self, slots: np.ndarray) -> LogitEdit:
        """Ban EOS and stop ids where `min_tokens` is not reached."""
        table = self._table
        early = np.flatnonzero(table.num_tokens[slots] < table.min_end[slots])
        if not len(early):
            return NoEdit()
        banned = []
        for row in early.tolist():
            seq = table.sequences[slots[row]]
            assert seq is not None
            params = seq.request.params
            banned.append([*self._stop_ids(params), *([] if params.ignore_eos else self._eos_ids)])
        return Ban(early, banned)


def _parts(columns: SamplingColumns, vocab_size: int) -> Iterator[slice]:
    """Runs of rows whose logits of a slice stay in the cache, and whose logits that are kept to be filtered are not too many."""
    most, count = max_kept(vocab_size), len(columns.temperature)
    starts = {0, *columns.filtered(vocab_size)[most::most].tolist(), *range(0, count, MOST_ROWS), count}
    return (slice(start, end) for start, end in pairwise(sorted(starts)))


def _rows(hidden: Entry, part: slice) -> Entry:
    if isinstance(hidden, QuantRows):
        return QuantRows(hidden.values[part], hidden.scale[part])
    return hidden[part]
