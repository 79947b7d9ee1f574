"""Everything real but the forward pass: for measuring the host side, and files of any size without a model's cost.

The next token is a fixed function of the last, so results are deterministic and independent of batching.
"""

from __future__ import annotations

import numpy as np
import torch

from batchinfer.core.plan import StepResult
from batchinfer.core.request import RowError
from batchinfer.core.sequences import SequenceTable
from batchinfer.core.vocabulary import Vocabulary
from batchinfer.runtime.batch import StepBatch
from batchinfer.runtime.logits import Editor
from batchinfer.runtime.verify import accept

NEVER = RowError("engine_error", "a fake model cannot fail")


class FakeRunner:
    """Computes nothing."""

    def forward(self, batch: StepBatch) -> None:
        """Nothing to compute: the head reads the last tokens itself."""


class FakeHead:
    """Next token = next ordinary token of a fixed cycle through the vocabulary. Never EOS."""

    def __init__(self, table: SequenceTable, vocabulary: Vocabulary, editors: tuple[Editor, ...] = ()) -> None:
        """Of `editors`, bans are obeyed: a banned token gives way to the first that is allowed."""
        self._table = table
        self._editors = editors
        avoid = vocabulary.special_ids | set(vocabulary.eos_ids)
        ordinary = np.array([i for i in range(vocabulary.size) if i not in avoid and vocabulary.token_bytes[i]], np.int32)
        ordinary = np.random.default_rng(0).permutation(ordinary)
        self._next = np.full(vocabulary.size, ordinary[0], np.int32)
        self._next[ordinary] = np.roll(ordinary, 1)

    def decide(self, hidden: None, batch: StepBatch) -> StepResult:
        """The tokens of each sampling span."""
        last = self._table.tokens[batch.sampling_slots, batch.fill_positions - 1]
        token_ids = self._next.take(last)
        edits = [edit for editor in self._editors for edit in editor.edits(batch.sampling_slots, batch.fill_positions)]
        if edits:
            logits = torch.zeros(len(token_ids), len(self._next))
            logits[torch.arange(len(token_ids)), torch.from_numpy(token_ids).long()] = 1.0
            for edit in edits:
                edit.change(0, logits)
            token_ids = logits.argmax(1).to(torch.int32).numpy()
        return accept(token_ids, np.ones(len(last), bool), batch, NEVER)
