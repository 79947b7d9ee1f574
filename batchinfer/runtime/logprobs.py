"""Log-probabilities from whole rows of logits: log_softmax of what the model gives, before any edit and temperature.

Every row is reduced by itself, in one order, so that its numbers do not depend on the rows beside it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from batchinfer.core.logprobs import Scores


def keep_scores(scores: Scores, logits: Tensor, slots: np.ndarray, places: np.ndarray, token_ids: np.ndarray, *, prompt: bool) -> None:
    """Tell `scores` of the tokens int [N] that fill `places` int [N] of `slots` int64 [N], by their logits float32 [N, V]."""
    wanted = np.minimum(scores.alternatives(slots, prompt), logits.shape[1])
    totals = (_totals if logits.device.type == "cpu" else _device_totals)(logits)
    chosen = logits[torch.arange(len(token_ids), device=logits.device), torch.from_numpy(token_ids).long().to(logits.device)]
    logprobs = np.minimum(chosen.cpu().numpy() - totals, 0.0)
    ids, values = _most_likely(logits, int(wanted.max(initial=0)))
    tops = np.minimum(values - totals[:, None], 0.0)
    for i, (slot, place, count) in enumerate(zip(slots.tolist(), places.tolist(), wanted.tolist(), strict=True)):
        scores.put(slot, place, float(logprobs[i]), ids[i, :count], tops[i, :count])


def _totals(logits: Tensor) -> np.ndarray:
    """log(sum(exp(logits))) of each row, float64 [N]."""
    rows = logits.numpy()
    totals = np.empty(len(rows))
    for i, row in enumerate(rows):
        largest = row.max()
        totals[i] = np.float64(largest) + np.log(np.exp(row - largest).sum(dtype=np.float64))
    return totals


def _device_totals(logits: Tensor) -> np.ndarray:
    totals: np.ndarray = logits.double().logsumexp(1).cpu().numpy()
    return totals


def _most_likely(logits: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32 and logits float32 [N, count] of each row's largest, in descending order, of equal ones the lower id first."""
    if not count:
        return np.empty((len(logits), 0), np.int32), np.empty((len(logits), 0), np.float32)
    least = logits.topk(count, dim=1).values[:, -1:]
    rows, ids = (logits >= least).nonzero(as_tuple=True)  # more than `count` where the last of them has equals
    values = logits[rows, ids].cpu().numpy()
    held, token_ids = rows.cpu().numpy(), ids.cpu().numpy()
    order = np.lexsort((token_ids, -values, held))
    first = np.searchsorted(held, np.arange(len(logits)))  # rows come in ascending order
    if len(held) < count * len(logits):  # rows with NaN have fewer: they fail anyway
        return np.zeros((len(logits), count), np.int32), np.full((len(logits), count), np.nan, np.float32)
    chosen = order[first[:, None] + np.arange(count)]
    return token_ids[chosen].astype(np.int32), values[chosen]
