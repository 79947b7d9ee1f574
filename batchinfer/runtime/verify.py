"""Which drafts the model agreed with: a comparison with what it sampled in their places."""

from __future__ import annotations

import numpy as np

from batchinfer.core.plan import StepResult
from batchinfer.core.request import RowError
from batchinfer.runtime.batch import StepBatch


def accept(token_ids: np.ndarray, sound: np.ndarray, batch: StepBatch, failure: RowError) -> StepResult:
    """From the token sampled at every logit row, int32 [R], to each span's tokens.

    A span keeps its sampled tokens up to and including the first that differs from the draft in its place: what
    follows was computed behind a token that the row does not have. A span fails where one that it keeps is not sound.
    """
    if len(token_ids) == len(batch.num_drafts):
        failures = {int(slot): failure for slot in batch.sampling_slots[~sound]} if not sound.all() else {}
        return StepResult.single(token_ids, failures)
    counts = batch.num_drafts + 1
    first = np.cumsum(counts) - counts
    place = np.arange(len(token_ids)) - np.repeat(first, counts)
    has_draft = place < np.repeat(batch.num_drafts, counts)
    agreed = np.zeros(len(token_ids), bool)
    agreed[has_draft] = token_ids[has_draft] == batch.draft_ids
    stops = np.where(agreed, len(token_ids), place)
    last = np.minimum.reduceat(stops, first)
    kept = place <= np.repeat(last, counts)
    bad = np.unique(batch.sampling_slots[kept & ~sound])
    return StepResult(token_ids[kept], (last + 1).astype(np.int32), {int(slot): failure for slot in bad})
