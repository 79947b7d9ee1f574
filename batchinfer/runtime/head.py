"""From hidden states to the step's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from batchinfer.core.logprobs import NoScores, Scores
from batchinfer.core.plan import StepResult
from batchinfer.core.request import RowError
from batchinfer.core.sequences import SequenceTable
from batchinfer.layers.lm_head import LmHead
from batchinfer.ops.draw import Draw, Drawn, Sampler, max_kept
from batchinfer.ops.rows import Entry, Product, QuantRows, to_dense
from batchinfer.runtime.batch import StepBatch
from batchinfer.runtime.logits import Editor, LogitEdit, apply_edits
from batchinfer.runtime.logprobs import keep_scores
from batchinfer.runtime.sampler import gather_columns
from batchinfer.runtime.ties import settle
from batchinfer.runtime.verify import accept

MOST_ROWS = 256  # in one pass over the vocabulary: more make no product faster
NOT_FINITE = RowError("non_finite_logits", "the model's logits for this row are NaN or infinite; try --dtype float32")


@dataclass(frozen=True, slots=True)
class Shaping:
    """What stands between the logits and the sampler: what changes them, and who is told of them before."""

    editors: tuple[Editor, ...] = ()
    scores: Scores = field(default_factory=NoScores)


class GenerateHead:
    """The LM head and the sampler: each slice of the vocabulary is consumed as it is computed."""

    def __init__(self, lm_head: LmHead, table: SequenceTable, vocab_size: int, shaping: Shaping, sampler: Sampler) -> None:
        """`vocab_size` is the tokenizer's: the model's table may be wider (padding), and those ids are never sampled."""
        self.lm_head = lm_head
        self._table = table
        self._vocab_size = vocab_size
        self._editors = shaping.editors
        self._scores = shaping.scores
        self._sampler = sampler
        self._memory = torch.empty(0, vocab_size)

    @torch.inference_mode()
    def decide(self, hidden: Entry, batch: StepBatch) -> StepResult:
        """hidden [R + P, H] -> each sampling span's tokens, on the host. The last P rows score prompt tokens."""
        slots, places = batch.sampling_slots, batch.fill_positions
        columns = gather_columns(self._table, slots, places, self._vocab_size)
        token_ids, sound = np.zeros(len(slots), np.int32), np.ones(len(slots), bool)
        told = self._scores.among(slots)
        kept = np.union1d(columns.filtered(self._vocab_size), told) if len(told) else columns.filtered(self._vocab_size)
        for part in _parts(kept, len(slots), self._vocab_size):
            draw = self._sampler.begin(columns.part(part), self.lm_head.rounds)
            raw = self._room(told[(told >= part.start) & (told < part.stop)] - part.start, _device(hidden))
            edits = [edit for editor in self._editors for edit in editor.edits(slots[part], places[part])]
            drawn = self._draw(_rows(hidden, part), draw, edits, raw)
            token_ids[part], sound[part] = drawn.token_ids, drawn.sound
            if len(raw.rows):
                of = raw.rows + part.start
                keep_scores(self._scores, raw.logits, slots[of], places[of], token_ids[of], prompt=False)
        if len(batch.scored.places):
            self._score(hidden, batch)
        return accept(token_ids, sound, batch, NOT_FINITE)

    def _draw(self, hidden: Entry, draw: Draw, edits: list[LogitEdit], raw: _RawLogits) -> Drawn:
        for first_id, logits in self.lm_head.slices(hidden, self._vocab_size):
            raw.take(first_id, logits)
            draw.take(first_id, apply_edits(edits, first_id, logits) if edits else logits)
        drawn = draw.finish()
        for edit in edits:
            if len(edit.moved):
                drawn = replace(drawn, ties=drawn.ties.without(edit.moved))
        return settle(drawn, hidden, self.lm_head)

    def _score(self, hidden: Entry, batch: StepBatch) -> None:
        """Log-probabilities of prompt tokens, of which nothing is drawn."""
        scored, first = batch.scored, len(batch.sampling_slots)
        count = len(scored.places)
        for part in _parts(np.arange(count), count, self._vocab_size):
            raw = self._room(np.arange(part.stop - part.start), _device(hidden))
            for first_id, logits in self.lm_head.slices(_rows(hidden, slice(first + part.start, first + part.stop)), self._vocab_size):
                raw.take(first_id, logits)
            slots, places = scored.slots[part], scored.places[part]
            keep_scores(self._scores, raw.logits, slots, places, self._table.tokens[slots, places], prompt=True)

    def _room(self, rows: np.ndarray, device: torch.device) -> _RawLogits:
        """Room for the whole logits of some rows: the same memory every step, so that no step faults it in."""
        if len(rows) > len(self._memory):
            self._memory = torch.empty(len(rows), self._vocab_size, device=device)
        return _RawLogits(rows, self._memory[: len(rows)])


class _RawLogits:
    """All logits, as the model gives them, of those rows that are told of them."""

    def __init__(self, rows: np.ndarray, logits: Tensor) -> None:
        """`rows` int64 [N], of the part of a step that is computed; `logits` float32 [N, V] is to be filled."""
        self.rows = rows
        self.logits = logits
        self._index = torch.from_numpy(rows).to(logits.device)

    def take(self, first_id: int, logits: Product) -> None:
        """Keep the logits of tokens `first_id` and on."""
        if len(self.rows):
            part = to_dense(logits.index_select(0, self._index), torch.float32)
            end = min(first_id + part.shape[1], self.logits.shape[1])
            self.logits[:, first_id:end] = part[:, : end - first_id]


def _parts(kept: np.ndarray, count: int, vocab_size: int) -> Iterator[slice]:
    """Runs of rows whose logits of a slice stay in the cache, and of which those that are `kept` whole are not too many."""
    most = max_kept(vocab_size)
    starts = {0, *kept[most::most].tolist(), *range(0, count, MOST_ROWS), count}
    return (slice(start, end) for start, end in pairwise(sorted(starts)))


def _rows(hidden: Entry, part: slice) -> Entry:
    if isinstance(hidden, QuantRows):
        return QuantRows(hidden.values[part], hidden.scale[part])
    return hidden[part]


def _device(hidden: Entry) -> torch.device:
    return (hidden.values if isinstance(hidden, QuantRows) else hidden).device
