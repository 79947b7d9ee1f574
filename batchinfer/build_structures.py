"""Structured output's part of the composition root. Nothing of its library is loaded before a row asks for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from batchinfer.core.request import Request, Result, SamplingParams, structure_of
from batchinfer.core.structure import StructureKind
from batchinfer.errors import ConfigError, InputError
from batchinfer.machine import usable_cores
from batchinfer.runtime.grammar import GrammarCompiler
from batchinfer.runtime.grammar_shelf import GrammarShelf

if TYPE_CHECKING:
    from batchinfer.build_model import ModelHandle
    from batchinfer.core.admission import EngineLimits
    from batchinfer.core.sequences import SequenceTable
    from batchinfer.engine import ControlPlane
    from batchinfer.runtime.constraints import Constraints
    from batchinfer.runtime.data_plane import DataPlane


def grammar_shelf(model: ModelHandle) -> GrammarShelf:
    """Compiles structures for a model's tokenizer; needs neither its weights nor torch."""
    tokenizer = model.tokenizer
    return GrammarShelf(GrammarCompiler(tokenizer.vocabulary, lambda text: tokenizer.encode(text, add_special_tokens=False)))


GIVEN_BY = {StructureKind.JSON: "--response-format", StructureKind.CHOICE: "--choices"}


def check_job_structure(defaults: SamplingParams, shelf: GrammarShelf) -> None:
    """Compile the structure of rows that bring none of their own: `ConfigError` where that fails, before any row would."""
    structure = defaults.structured_outputs
    if structure is None:
        return
    try:
        shelf.require(structure)
    except InputError as error:
        raise ConfigError(f"{GIVEN_BY.get(structure.kind, 'structured_outputs')}: {error}") from None


class StructureParts:
    """What follows the rows of one engine, and where it hangs on its other parts."""

    constraints: Constraints

    def __init__(self, model: ModelHandle) -> None:
        self._shelf = grammar_shelf(model)
        self._vocabulary = model.tokenizer.vocabulary

    def follow(self, table: SequenceTable) -> Constraints:
        """Make `constraints`, for the rows of `table`."""
        from batchinfer.runtime.constraints import Constraints

        self.constraints = Constraints(table, self._vocabulary, self._shelf, usable_cores())
        return self.constraints

    def added(self, control: ControlPlane, data: DataPlane, limits: EngineLimits) -> tuple[ControlPlane, DataPlane]:
        """Both planes with structured output: certain tokens are guessed, and masks begun with every batch."""
        from batchinfer.runtime.constraints import ExplainingHead, MaskingBatcher
        from batchinfer.runtime.forced import StructuredDrafts

        table = control.memory.table
        drafter = StructuredDrafts(control.drafter, self.constraints, table, limits.block_size, limits.max_num_batched_tokens)
        return (
            replace(control, drafter=drafter, structures=self._shelf),
            replace(data, batcher=MaskingBatcher(data.batcher, self.constraints), head=ExplainingHead(data.head, self.constraints)),
        )


def schemas_checked(items: Iterable[Request | Result], shelf: GrammarShelf) -> Iterator[Request | Result]:
    """The items, with those whose structure cannot be compiled as failed results; nothing is run."""
    for item in shelf.ahead(iter(items), structure_of):
        if isinstance(item, Request):
            try:
                shelf.require(item.params.structured_outputs)
            except InputError as error:
                yield Result.failed(item.row, error, len(item.prompt_ids))
                continue
        if item is not None:
            yield item
