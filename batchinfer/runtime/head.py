"""From hidden states to the step's tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from batchinfer.core.plan import StepResult
from batchinfer.core.request import RowError, SamplingParams
from batchinfer.core.sequences import SequenceTable
from batchinfer.core.vocabulary import Vocabulary
from batchinfer.layers.linear import Linear
from batchinfer.ops.table import Ops
from batchinfer.runtime.batch import StepBatch
from batchinfer.runtime.sampler import gather_columns, sample

NOT_FINITE = RowError("non_finite_logits", "the model's logits for this row are NaN or infinite; try --dtype float32")
SLICE_ROWS = 64  # rows of logits alive at a time: 64 x 128,000 float32 are 32 MB


class GenerateHead:
    """The LM head and the sampler."""

    def __init__(
        self, lm_head: Linear, table: SequenceTable, vocabulary: Vocabulary, stop_ids: Callable[[SamplingParams], tuple[int, ...]], ops: Ops
    ) -> None:
        self._lm_head = lm_head
        self._table = table
        self._vocab_size = vocabulary.size
        self._eos_ids = [i for i in vocabulary.eos_ids if i < vocabulary.size]
        self._argmax = ops.argmax
        self._stop_ids = stop_ids

    @torch.inference_mode()
    def decide(self, hidden: Tensor, batch: StepBatch) -> StepResult:
        """hidden [R, H] -> one token per row, int32 [R] on the host."""
        slots = batch.sampling_slots
        failures: dict[int, RowError] = {}
        parts = [self._decide(hidden[i : i + SLICE_ROWS], slots[i : i + SLICE_ROWS], failures) for i in range(0, len(slots), SLICE_ROWS)]
        if not parts:
            return StepResult(np.empty(0, np.int32))
        token_ids = torch.cat(parts) if len(parts) > 1 else parts[0]
        return StepResult(token_ids.to("cpu", torch.int32).numpy(), failures)

    def _decide(self, hidden: Tensor, slots: np.ndarray, failures: dict[int, RowError]) -> Tensor:
        # The model's table may be wider than the tokenizer (padding): those ids are never sampled.
        logits = self._lm_head(hidden)[:, : self._vocab_size]
        logits = self._without_early_ends(logits, slots)
        token_ids = self._argmax(logits)
        # The largest logit is NaN or infinite if any is NaN, any is +inf, or all are -inf.
        sound = torch.isfinite(logits.gather(1, token_ids[:, None]).squeeze(1))
        if not bool(sound.all()):
            failures.update({int(slot): NOT_FINITE for slot in slots[~sound.cpu().numpy()]})
            logits = torch.where(sound[:, None], logits, torch.zeros((), dtype=logits.dtype, device=logits.device))
        noisy = np.flatnonzero(self._table.temperature[slots] > 0)
        if len(noisy):
            rows = torch.from_numpy(noisy).to(logits.device)
            columns = gather_columns(self._table, slots[noisy], self._vocab_size, logits.device)
            token_ids[rows] = sample(logits[rows], columns)
        return token_ids

    def _without_early_ends(self, logits: Tensor, slots: np.ndarray) -> Tensor:
        """Ban EOS and stop ids where `min_tokens` is not reached."""
        table = self._table
        early = np.flatnonzero(table.num_tokens[slots] < table.min_end[slots])
        if not len(early):
            return logits
        logits = logits.clone()
        for row in early.tolist():
            seq = table.sequences[slots[row]]
            assert seq is not None
            params = seq.request.params
            banned = [*self._stop_ids(params), *([] if params.ignore_eos else self._eos_ids)]
            logits[row, banned] = -torch.inf
        return logits
