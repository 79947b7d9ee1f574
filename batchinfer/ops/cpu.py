"""Operations that something on the CPU does better than torch; each gives the reference's result."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from batchinfer.ops.table import REFERENCE, REFERENCE_INT8


def argmax(logits: Tensor) -> Tensor:
    """[R, V] -> int64 [R], the first of the largest in each row; NumPy's search is vectorised, torch's is not."""
    return torch.from_numpy(logits.float().numpy().argmax(-1))


CPU = replace(REFERENCE, argmax=argmax)
CPU_INT8 = replace(REFERENCE_INT8, argmax=argmax)
