"""Everything real but the forward pass: for measuring the host side, and files of any size without a model's cost.

The next token is a fixed function of the last, so results are deterministic and independent of batching.
"""

from __future__ import annotations

import numpy as np

from batchinfer.core.plan import StepResult
from batchinfer.core.request import RowError
from batchinfer.core.sequences import SequenceTable
from batchinfer.core.vocabulary import Vocabulary
from batchinfer.runtime.batch import StepBatch
from batchinfer.runtime.verify import accept

NEVER = RowError("engine_error", "a fake model cannot fail")


class FakeRunner:
    """Computes nothing."""

    def forward(self, batch: StepBatch) -> None:
        """Nothing to compute: the head reads the last tokens itself."""


class FakeHead:
    """Next token = next ordinary token of a fixed cycle through the vocabulary. Never EOS."""

    def __init__(self, table: SequenceTable, vocabulary: Vocabulary) -> None:
        self._table = table
        avoid = vocabulary.special_ids | set(vocabulary.eos_ids)
        ordinary = np.array([i for i in range(vocabulary.size) if i not in avoid and vocabulary.token_bytes[i]], np.int32)
        ordinary = np.random.default_rng(0).permutation(ordinary)
        self._next = np.full(vocabulary.size, ordinary[0], np.int32)
        self._next[ordinary] = np.roll(ordinary, 1)

    def decide(self, hidden: None, batch: StepBatch) -> StepResult:
        """The tokens of each sampling span."""
        last = self._table.tokens[batch.sampling_slots, batch.fill_positions - 1]
        return accept(self._next.take(last), np.ones(len(last), bool), batch, NEVER)
