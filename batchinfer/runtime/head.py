"""From hidden states to the step's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from batchinfer.core.plan import StepResult
from batchinfer.core.request import RowError
from batchinfer.core.sequences import SequenceTable
from batchinfer.layers.lm_head import LmHead
from batchinfer.ops.draw import Draw, Drawn, Sampler, SamplingColumns, max_kept
from batchinfer.ops.rows import Entry, QuantRows
from batchinfer.runtime.batch import StepBatch
from batchinfer.runtime.logits import Editor, LogitEdit, apply_edits
from batchinfer.runtime.sampler import gather_columns
from batchinfer.runtime.ties import settle
from batchinfer.runtime.verify import accept

MOST_ROWS = 256  # in one pass over the vocabulary: more make no product faster
NOT_FINITE = RowError("non_finite_logits", "the model's logits for this row are NaN or infinite; try --dtype float32")


class GenerateHead:
    """The LM head and the sampler: each slice of the vocabulary is consumed as it is computed."""

    def __init__(self, lm_head: LmHead, table: SequenceTable, vocab_size: int, editors: tuple[Editor, ...], sampler: Sampler) -> None:
        """`vocab_size` is the tokenizer's: the model's table may be wider (padding), and those ids are never sampled."""
        self.lm_head = lm_head
        self._table = table
        self._vocab_size = vocab_size
        self._editors = editors
        self._sampler = sampler

    @torch.inference_mode()
    def decide(self, hidden: Entry, batch: StepBatch) -> StepResult:
        """hidden [R, H] -> each sampling span's tokens, on the host."""
        slots, places = batch.sampling_slots, batch.fill_positions
        columns = gather_columns(self._table, slots, places, self._vocab_size)
        token_ids, sound = np.zeros(len(slots), np.int32), np.ones(len(slots), bool)
        for part in _parts(columns, self._vocab_size):
            draw = self._sampler.begin(columns.part(part), self.lm_head.rounds)
            edits = [edit for editor in self._editors for edit in editor.edits(slots[part], places[part])]
            drawn = self._draw(_rows(hidden, part), draw, edits)
            token_ids[part], sound[part] = drawn.token_ids, drawn.sound
        return accept(token_ids, sound, batch, NOT_FINITE)

    def _draw(self, hidden: Entry, draw: Draw, edits: list[LogitEdit]) -> Drawn:
        for first_id, logits in self.lm_head.slices(hidden, self._vocab_size):
            draw.take(first_id, apply_edits(edits, first_id, logits) if edits else logits)
        drawn = draw.finish()
        for edit in edits:
            if len(edit.moved):
                drawn = replace(drawn, ties=drawn.ties.without(edit.moved))
        return settle(drawn, hidden, self.lm_head)


def _parts(columns: SamplingColumns, vocab_size: int) -> Iterator[slice]:
    """Runs of rows whose logits of a slice stay in the cache, and whose logits that are kept to be filtered are not too many."""
    most, count = max_kept(vocab_size), len(columns.temperature)
    starts = {0, *columns.filtered(vocab_size)[most::most].tolist(), *range(0, count, MOST_ROWS), count}
    return (slice(start, end) for start, end in pairwise(sorted(starts)))


def _rows(hidden: Entry, part: slice) -> Entry:
    if isinstance(hidden, QuantRows):
        return QuantRows(hidden.values[part], hidden.scale[part])
    return hidden[part]
