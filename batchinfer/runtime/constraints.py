"""The running rows' structures: where each stands in its grammar, which tokens may follow, and when it is complete.

A matcher has consumed exactly the row's own tokens. Drafts are looked at and rolled back, so that a row's masks depend
on nothing but what it has said. The masks of a step are computed in threads of their own while the model runs.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from batchinfer.core.plan import Drafts, Plan, StepResult
from batchinfer.core.request import RowError
from batchinfer.core.sequences import Sequence, SequenceTable
from batchinfer.core.vocabulary import Vocabulary
from batchinfer.runtime.batch import StepBatch
from batchinfer.runtime.data_plane import BatchBuilder, Head
from batchinfer.runtime.grammar_shelf import GrammarShelf
from batchinfer.runtime.logits import AskingSlots, LogitEdit
from batchinfer.runtime.masking import MaskEdit, Masks

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

MOST_THREADS = 4  # that compute masks; a mask takes some 20 microseconds
IMPOSSIBLE = (
    "no token is left to continue with: bad_words, logit_bias or min_tokens exclude what the structure allows here "
    "(or the model's logits are not finite; try --dtype float32)"
)


@dataclass(slots=True)
class _Masks:
    """Masks of some rows at some places: row `first[slot] + j` is for the place j behind the slot's last token."""

    first: dict[int, int]
    extent: dict[int, int]  # places behind the last token that are covered
    work: list[tuple[Any, int, list[int]]]  # matcher, its first row, tokens of the places
    count: int
    made: Masks = field(init=False)

    def has(self, slots: Tokens[int], offsets: Tokens[int]) -> bool:
        return all(self.extent.get(slot, -1) >= offset for slot, offset in zip(slots, offsets, strict=True))


class Constraints:
    """Follows the rows that have a structure. An `Editor` of logits, and the `RowEndings` of the stop checker."""

    def __init__(self, table: SequenceTable, vocabulary: Vocabulary, shelf: GrammarShelf, num_threads: int) -> None:
        self._table = table
        self._vocab_size = vocabulary.size
        self._eos_ids = frozenset(vocabulary.eos_ids)
        self._eos_bits = _bits_of(vocabulary.eos_ids, vocabulary.size)
        self._end_bits = _bits_of(vocabulary.eos_ids[:1], vocabulary.size)
        self._shelf = shelf
        self._num_threads = min(num_threads, MOST_THREADS)
        self._matchers: dict[int, LLMatcher] = {}
        self._seen = np.zeros(table.num_slots, np.int32)  # tokens of the row that its matcher has consumed, the prompt included
        self.asking = AskingSlots(table.num_slots)
        self._executor: LLExecutor | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._begun: tuple[_Masks, Future[None]] | None = None

    def admit(self, seq: Sequence) -> None:
        """Start a matcher; a row that was preempted goes on where it was."""
        structure = seq.request.params.structured_outputs
        if structure is None:
            return
        self._forget_masks()
        slot = seq.slot
        self._matchers[slot] = self._shelf.grammar(structure).start()
        self._seen[slot] = self._table.num_prompt[slot]
        self.asking.add(slot)
        self._catch_up(slot)

    def forget(self, slots: np.ndarray) -> None:
        """These rows leave."""
        for slot in self.asking.drop(slots).tolist():
            self._forget_masks()
            del self._matchers[slot]

    def ended(self, slots: np.ndarray) -> np.ndarray | None:
        """Which rows are complete with the token just appended, bool [R]: nothing may follow."""
        index = self.asking.among(slots)
        if not len(index):
            return None
        self._forget_masks()
        out = np.zeros(len(slots), bool)
        for at, slot in zip(index.tolist(), slots[index].tolist(), strict=True):
            matcher = self._catch_up(slot)
            out[at] = matcher.is_stopped() and not matcher.is_error()
        return out

    def whole(self, slot: int) -> bool:
        """True where the row is complete without an end token: its last token belongs to the text."""
        matcher = self._matchers.get(slot)
        if matcher is None or not matcher.is_stopped() or matcher.is_error():
            return False
        return int(self._table.tokens[slot, self._table.num_tokens[slot] - 1]) not in self._eos_ids

    def forced(self, slot: int, most: int) -> list[int]:
        """The row's next tokens as far as there is no choice, at most `most` of them."""
        if most <= 0:
            return []
        self._forget_masks()
        return self._matchers[slot].compute_ff_tokens()[:most]

    def legal(self, slot: int, token_ids: list[int]) -> int:
        """How many of the tokens the structure allows next, one after another."""
        self._forget_masks()
        ends = [at for at, token in enumerate(token_ids) if token in self._eos_ids]
        token_ids = token_ids[: ends[0]] if ends else token_ids  # behind an end there is nothing to verify
        return self._matchers[slot].validate_tokens(token_ids) if token_ids else 0

    def explain(self, slot: int, error: RowError) -> RowError:
        """The error of a failed row in words of its structure, where that is the cause."""
        matcher = self._matchers.get(slot)
        if matcher is None or error.code != "non_finite_logits":
            return error
        if matcher.is_error():
            words = " ".join(matcher.get_error().split("<non-verbose/>")[0].split())
            return RowError("structured_output_failed", f"the structure cannot be followed further: {words[:200]}")
        return RowError("structured_output_impossible", IMPOSSIBLE)

    def begin(self, slots: np.ndarray, places: np.ndarray) -> None:
        """Start on the masks of the logit rows that fill `places` of `slots`, beside whatever comes next."""
        self._forget_masks()
        index = self.asking.among(slots)
        if len(index):
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "masks")
            masks = self._laid_out(slots[index], places[index])
            self._begun = masks, self._thread.submit(self._compute, masks)

    def edits(self, slots: np.ndarray, places: np.ndarray) -> tuple[LogitEdit, ...]:
        """What the structures forbid in the logit rows that fill `places` int [R] of `slots` int64 [R]."""
        index = self.asking.among(slots)
        if not len(index):
            return ()
        who = slots[index]
        offsets = (places[index] - self._table.num_tokens[who]).tolist()
        masks = self._ready(who.tolist(), offsets)
        if masks is None:
            masks = self._laid_out(who, places[index])
            self._compute(masks)
        rows = np.array([masks.first[slot] + offset for slot, offset in zip(who.tolist(), offsets, strict=True)])
        return (MaskEdit(index, masks.made.at(rows)),)

    def _catch_up(self, slot: int) -> LLMatcher:
        matcher, end = self._matchers[slot], int(self._table.num_tokens[slot])
        if self._seen[slot] < end:
            matcher.consume_tokens(self._table.tokens[slot, self._seen[slot] : end].tolist())
            self._seen[slot] = end
        return matcher

    def _forget_masks(self) -> None:
        """Before a matcher is touched: nobody else may be at it."""
        if self._begun is not None:
            wait((self._begun[1],))
            self._begun = None

    def _ready(self, slots: list[int], offsets: list[int]) -> _Masks | None:
        if self._begun is None:
            return None
        masks, done = self._begun
        done.result()
        return masks if masks.has(slots, offsets) else None

    def _laid_out(self, slots: np.ndarray, places: np.ndarray) -> _Masks:
        table = self._table
        ends = table.num_tokens[slots]
        extent: dict[int, int] = {}
        for slot, offset in zip(slots.tolist(), (places - ends).tolist(), strict=True):
            extent[slot] = max(offset, extent.get(slot, 0))
        first, work, count = {}, [], 0
        for slot, most in extent.items():
            end = int(table.num_tokens[slot])
            first[slot] = count
            work.append((self._matchers[slot], count, table.tokens[slot, end : end + most].tolist() if most else []))
            count += most + 1
        return _Masks(first, extent, work, count)

    def _compute(self, masks: _Masks) -> None:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._num_threads)
        bits = np.zeros((masks.count, -(-self._vocab_size // 32)), np.int32)
        shape = (bits.ctypes.data, 4 * bits.shape[1], len(bits))
        single = [(matcher, first) for matcher, first, drafts in masks.work if not drafts]
        drafted = [item for item in masks.work if item[2]]
        if single:
            self._executor.unsafe_compute_mask_ptr(single, *shape)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *shape)
        for matcher, first, drafts in masks.work:
            if matcher.is_error():  # its mask allows an end that is none
                bits[first : first + len(drafts) + 1] = 0
        over = bits.any(1) & ~(bits & ~self._eos_bits).any(1)
        bits[over] = self._end_bits  # one end is enough: a single token cannot be banned
        masks.made = Masks.of(bits)


def _bits_of(token_ids: Tokens[int], vocab_size: int) -> np.ndarray:
    """A mask int32 [words] that allows these ids."""
    mask = np.zeros(-(-vocab_size // 32) * 32, bool)
    mask[list(token_ids)] = True
    return np.packbits(mask, bitorder="little").view(np.int32)


class MaskingBatcher:
    """Starts on the masks of a step as soon as its rows are known."""

    def __init__(self, inner: BatchBuilder, constraints: Constraints) -> None:
        self._inner = inner
        self._constraints = constraints

    def build(self, plan: Plan, drafts: Drafts) -> Any:
        """The batch; its masks are on their way."""
        batch: StepBatch = self._inner.build(plan, drafts)
        self._constraints.begin(batch.sampling_slots, batch.fill_positions)
        return batch


class ExplainingHead:
    """Says of rows that fail for their structure's sake that they do."""

    def __init__(self, inner: Head, constraints: Constraints) -> None:
        self._inner = inner
        self._constraints = constraints

    def decide(self, hidden: Any, batch: Any) -> StepResult:
        """The tokens of each sampling span."""
        result = self._inner.decide(hidden, batch)
        if result.failures:
            result.failures = {slot: self._constraints.explain(slot, error) for slot, error in result.failures.items()}
        return result
