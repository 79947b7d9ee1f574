"""The forward pass of one step."""

from __future__ import annotations

import torch

from batchinfer.attention.base import AttentionBackend
from batchinfer.model.decoder import Decoder
from batchinfer.ops.rows import Entry
from batchinfer.runtime.batch import StepBatch


class EagerRunner:
    """Runs the decoder operation by operation."""

    def __init__(self, decoder: Decoder, attention: AttentionBackend) -> None:
        self._decoder = decoder
        self._attention = attention

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Entry:
        """Normed hidden states [R, H] of the rows that are sampled, nothing else."""
        attend = self._attention.bind(batch.attn)
        x, residual = self._decoder.forward(batch.input_ids, batch.positions, attend)
        rows = batch.logit_rows
        return self._decoder.final_norm(x.index_select(0, rows), residual.index_select(0, rows))
