"""What changes logits, as part of the composition root: the editors of an engine, in the order in which they apply."""

from __future__ import annotations

from batchinfer.build_control import RowParts
from batchinfer.build_model import ModelHandle
from batchinfer.runtime.bias import BadWords, LogitBias
from batchinfer.runtime.logits import Editor, MinTokens
from batchinfer.runtime.penalties import Penalties


def choose_editors(model: ModelHandle, rows: RowParts, constraints: Editor) -> tuple[Editor, ...]:
    """Every editor looks only at rows that ask for it; one head after another may use them, as a draft model's does."""
    vocabulary = model.tokenizer.vocabulary
    eos_ids = [i for i in vocabulary.eos_ids if i < vocabulary.size]
    return (
        BadWords(rows.table, lambda text: list(model.tokenizer.encode(text, add_special_tokens=False)), vocabulary.size),
        MinTokens(rows.table, eos_ids, rows.stopper.stop_ids),
        LogitBias(rows.table),
        Penalties(rows.table),
        constraints,  # the last: it lets through what nothing can replace
    )
