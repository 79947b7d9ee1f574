"""When a row ends: EOS, stop ids, stop strings, repetition, length.

Text is looked at only when it can matter. For every distinct set of stop strings the tokens in which one of them
could end are marked once; a row's bytes are joined only when such a token comes, so 1,024 rows with stop strings
cost a table look-up a step.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np

from batchinfer.core.plan import StepResult
from batchinfer.core.repetition import RepetitionWatch
from batchinfer.core.request import FinishReason, SamplingParams
from batchinfer.core.sequences import Sequence, SequenceTable
from batchinfer.core.structure import NeverEnds, RowEndings
from batchinfer.core.vocabulary import Vocabulary

GOES_ON, STOP, LENGTH, REPETITION = 0, 1, 2, 3
REASONS = {STOP: FinishReason.STOP, LENGTH: FinishReason.LENGTH, REPETITION: FinishReason.REPETITION}


@dataclass(frozen=True, slots=True)
class WatchSpec:
    """What a row watches for beyond EOS; equal specs share one table."""

    strings: tuple[bytes, ...]
    token_ids: frozenset[int]
    skip_special: bool


@dataclass(slots=True, eq=False)
class Watcher:
    """The marked tokens of one spec, and how many running rows use it."""

    spec: WatchSpec
    index: int
    longest: int
    users: int = 0
    cut_at: dict[int, int] = field(default_factory=dict)  # slot -> length in bytes of the text to keep


class TokenSpellings:
    """Every token's bytes, sorted and joined, to find the tokens that could end a string."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        table = vocabulary.token_bytes
        order = sorted(range(len(table)), key=table.__getitem__)
        self._ids = np.array(order, np.int64)
        self._sorted = [table[i] for i in order]
        self._blob = b"".join(table)
        lengths = np.fromiter((len(t) for t in table), np.int64, len(table))
        self._ends = np.cumsum(lengths)
        self._longest = int(lengths.max(initial=0))

    def mark(self, text: bytes, marks: np.ndarray) -> None:
        """Set `marks[id]` for each token in which an occurrence of `text` may end (bool [vocabulary])."""
        for begin in range(max(1, len(text) - self._longest), len(text)):  # the token starts with a proper suffix of the text
            suffix = text[begin:]
            low = bisect_left(self._sorted, suffix)
            after = suffix.rstrip(b"\xff")
            high = bisect_left(self._sorted, after[:-1] + bytes([after[-1] + 1])) if after else len(self._sorted)
            marks[self._ids[low:high]] = True
        at = self._blob.find(text)
        while at >= 0:  # or holds it whole
            token = int(np.searchsorted(self._ends, at, side="right"))
            if at + len(text) <= self._ends[token]:
                marks[token] = True
            at = self._blob.find(text, at + 1)


class StopChecker:
    """Decides which rows end with the tokens just appended."""

    def __init__(self, table: SequenceTable, vocabulary: Vocabulary, endings: RowEndings | None = None) -> None:
        """`endings` knows of rows whose structure is complete; none of them by default."""
        self._endings = endings or NeverEnds()
        self._table = table
        self._vocabulary = vocabulary
        self._repetition = RepetitionWatch(table)
        self._eos = np.zeros(max(vocabulary.size, 1), bool)
        self._eos[[i for i in vocabulary.eos_ids if i < vocabulary.size]] = True
        self._by_spelling = {vocabulary.token_bytes[i]: i for i in sorted(vocabulary.special_ids, reverse=True) if i < vocabulary.size}
        self._spellings: TokenSpellings | None = None
        self._watchers: dict[WatchSpec, Watcher] = {}
        self._by_index: list[Watcher | None] = [None]  # index 0: nothing to watch for
        self._marks = np.zeros((1, self._eos.size), bool)

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Ids that end the row, EOS not included."""
        return tuple(sorted(self._spec(params).token_ids))

    def admit(self, seq: Sequence) -> None:
        """Start watching for a row that has just been given a slot."""
        self._repetition.admit(seq)
        params = seq.request.params
        if not params.stop and not params.stop_token_ids:
            return
        spec = self._spec(params)
        watcher = self._watchers.get(spec) or self._new_watcher(spec)
        watcher.users += 1
        self._table.watch[seq.slot] = watcher.index

    def forget(self, slots: np.ndarray) -> None:
        """Stop watching for rows that leave; call before their slots are freed."""
        self._repetition.forget(slots)
        for slot in slots[self._table.watch[slots] > 0].tolist():
            watcher = self._by_index[self._table.watch[slot]]
            assert watcher is not None
            watcher.cut_at.pop(slot, None)
            watcher.users -= 1
            if watcher.users == 0 and len(self._watchers) > 256:  # many different stops: keep the table small
                del self._watchers[watcher.spec]
                self._by_index[watcher.index] = None
            self._table.watch[slot] = 0

    def append(self, slots: np.ndarray, result: StepResult) -> tuple[np.ndarray, np.ndarray]:
        """Append each sampling slot's tokens until its row ends; (tokens appended int32 [R], verdicts int8 [R])."""
        if len(result.token_ids) == len(slots):  # one each: the steady case
            self._table.append(slots, result.token_ids)
            return result.counts, self.check(slots, result.token_ids)
        emitted, verdicts = np.zeros(len(slots), np.int32), np.zeros(len(slots), np.int8)
        for index, token_ids in result.waves():
            goes_on = verdicts[index] == GOES_ON  # a row may have ended with the token before
            index, token_ids = index[goes_on], token_ids[goes_on]
            self._table.append(slots[index], token_ids)
            verdicts[index] = self.check(slots[index], token_ids)
            emitted[index] += 1
        return emitted, verdicts

    def check(self, slots: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """Verdict per slot after its token was appended, int8 [R]: goes on, stop, repetition or length."""
        table = self._table
        num_tokens = table.num_tokens[slots]
        verdict: np.ndarray = (num_tokens >= table.limit[slots]) * np.int8(LENGTH)  # or 0, GOES_ON
        ended = self._eos.take(token_ids, mode="clip") & ~table.ignore_eos[slots]
        watch = table.watch[slots]
        if watch.any():
            looks = self._marks[watch, np.minimum(token_ids, self._eos.size - 1)] & (watch > 0)
            for i in np.flatnonzero(looks).tolist():
                ended[i] = ended[i] or self._stops(int(slots[i]), int(token_ids[i]))
        may_end = num_tokens >= table.min_end[slots]
        verdict[self._repetition.check(slots) & may_end] = REPETITION
        verdict[ended & may_end] = STOP
        complete = self._endings.ended(slots)
        if complete is not None:
            verdict[complete] = STOP  # whatever min_tokens or ignore_eos say: nothing can follow
        return verdict

    def text(self, seq: Sequence, output_ids: np.ndarray, reason: FinishReason) -> str:
        """The row's final text: stop string or stop token cut off unless asked for."""
        params, vocabulary = seq.request.params, self._vocabulary
        watcher = self._by_index[self._table.watch[seq.slot]]
        kept = None if watcher is None else watcher.cut_at.get(seq.slot)
        ids = output_ids
        if reason is FinishReason.STOP and kept is None and not params.include_stop_str_in_output and not self._endings.whole(seq.slot):
            ids = ids[:-1]
        if kept is None:
            return vocabulary.continuation(ids, params.skip_special_tokens)
        return self._text_up_to(ids.tolist(), kept, params.skip_special_tokens)

    def _text_up_to(self, ids: list[int], kept: int, skip_special: bool) -> str:
        """The first `kept` bytes of the tokens' text; only the token that the cut falls in is taken apart."""
        vocabulary = self._vocabulary
        whole, length = 0, 0
        for token_id in ids:
            size = len(vocabulary.text_bytes((token_id,), skip_special))
            if length + size > kept:
                break
            whole, length = whole + 1, length + size
        rest = vocabulary.text_bytes(ids[whole : whole + 1], skip_special)[: kept - length]
        if not rest:
            return vocabulary.continuation(ids[:whole], skip_special)
        raw = vocabulary.text_bytes(ids[:whole], skip_special) + rest
        return raw.decode("utf-8", errors="replace")

    def _spec(self, params: SamplingParams) -> WatchSpec:
        """A stop string that spells a special token is that token: its text may never show."""
        special = {self._by_spelling[s] for text in params.stop if (s := text.encode("utf-8", "surrogatepass")) in self._by_spelling}
        strings = tuple(sorted({text.encode("utf-8", "surrogatepass") for text in params.stop}))
        return WatchSpec(strings, frozenset(params.stop_token_ids) | special, params.skip_special_tokens)

    def _new_watcher(self, spec: WatchSpec) -> Watcher:
        if self._spellings is None and spec.strings:
            self._spellings = TokenSpellings(self._vocabulary)
        free = next((i for i in range(1, len(self._by_index)) if self._by_index[i] is None), len(self._by_index))
        if free == len(self._by_index):
            self._by_index.append(None)
            if free >= len(self._marks):
                self._marks = np.concatenate((self._marks, np.zeros((max(4, free), self._eos.size), bool)))
        marks = self._marks[free]
        marks[:] = False
        marks[[i for i in spec.token_ids if i < len(marks)]] = True
        for text in spec.strings:
            assert self._spellings is not None
            self._spellings.mark(text, marks)
        watcher = Watcher(spec, free, max(map(len, spec.strings), default=0))
        self._by_index[free] = watcher
        self._watchers[spec] = watcher
        return watcher

    def _stops(self, slot: int, token_id: int) -> bool:
        """Whether the newest token ends the row: a stop id, or the end of a stop string inside it."""
        table = self._table
        watcher = self._by_index[table.watch[slot]]
        assert watcher is not None
        if token_id in watcher.spec.token_ids:
            return True
        if not watcher.spec.strings or table.num_tokens[slot] < table.min_end[slot]:
            return False
        output = table.tokens[slot, table.num_prompt[slot] : table.num_tokens[slot]].tolist()
        skip = watcher.spec.skip_special
        newest = len(self._vocabulary.text_bytes(output[-1:], skip))
        if not newest:
            return False
        tail, first = b"", len(output)
        while first > 0 and len(tail) < watcher.longest + newest:  # never further back than the answer's start
            first = max(0, first - 16)
            tail = self._vocabulary.text_bytes(output[first:], skip)
        hit = self._earliest(tail, newest, watcher.spec.strings)
        if hit is None:
            return False
        start, length = hit
        seq = table.sequences[slot]
        assert seq is not None
        before = len(self._vocabulary.text_bytes(output[:first], skip))
        watcher.cut_at[slot] = before + start + (length if seq.request.params.include_stop_str_in_output else 0)
        return True

    @staticmethod
    def _earliest(tail: bytes, newest: int, strings: tuple[bytes, ...]) -> tuple[int, int] | None:
        """(start, length) of the leftmost stop string that ends within the last `newest` bytes."""
        best: tuple[int, int] | None = None
        for text in strings:
            at = tail.find(text, max(0, len(tail) - newest - len(text) + 1))
            if at >= 0 and (best is None or at < best[0]):
                best = (at, len(text))
        return best
