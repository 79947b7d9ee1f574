"""The order in which waiting rows are admitted, among those read so far. The output order is the input's regardless."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from batchinfer.core.sequences import Sequence

SHARED_PREFIX_TOKENS = 64  # rows that share less than this gain nothing from running side by side


class WaitingQueue(Protocol):
    """Rows that wait for admission; returned rows (preempted, deferred) go first."""

    def __len__(self) -> int: ...

    def push(self, seq: Sequence) -> None:
        """Add a new row."""

    def push_front(self, seqs: Iterable[Sequence]) -> None:
        """Give rows back that were taken, or preempted: they go first, in this order."""

    def take(self) -> Iterator[Sequence]:
        """Yield rows in order; a row is out of the queue once it is yielded."""


class ArrivalQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._rows: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    def push(self, seq: Sequence) -> None:
        """Add a new row."""
        self._rows.append(seq)

    def push_front(self, seqs: Iterable[Sequence]) -> None:
        """Give rows back; they go first."""
        self._rows.extendleft(reversed(list(seqs)))

    def take(self) -> Iterator[Sequence]:
        """Yield rows in order of arrival."""
        while self._rows:
            yield self._rows.popleft()


class GroupedQueue:
    """Rows that share a prefix together, groups with long outputs first.

    Rows are sorted in generations: new ones wait until the sorted ones are gone. A short row therefore waits for one
    generation at most, however many long ones follow it in the file, and results come out roughly in file order.
    """

    def __init__(self) -> None:
        self._front: deque[Sequence] = deque()
        self._sorted: deque[Sequence] = deque()
        self._new: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._front) + len(self._sorted) + len(self._new)

    def push(self, seq: Sequence) -> None:
        """Add a new row."""
        self._new.append(seq)

    def push_front(self, seqs: Iterable[Sequence]) -> None:
        """Give rows back; they go first."""
        self._front.extendleft(reversed(list(seqs)))

    def take(self) -> Iterator[Sequence]:
        """Yield rows: returned ones, then group by group."""
        while True:
            if self._front:
                yield self._front.popleft()
                continue
            if not self._sorted:
                if not self._new:
                    return
                self._sorted = deque(grouped(self._new))
                self._new = []
            yield self._sorted.popleft()


def grouped(seqs: list[Sequence]) -> list[Sequence]:
    """Sort by shared prefix and expected length.

    Rows whose first `SHARED_PREFIX_TOKENS` tokens agree form a group. Groups come longest output first (by their
    longest row), rows of a group by classes of output length (powers of two), then in prefix order, so that deeper
    shared prefixes stand together; arrival breaks ties.
    """
    groups: dict[bytes, list[Sequence]] = {}
    for seq in seqs:
        ids = seq.request.prompt_ids
        key = ids[:SHARED_PREFIX_TOKENS].tobytes() if len(ids) > SHARED_PREFIX_TOKENS else b"%d" % seq.seq_id
        groups.setdefault(key, []).append(seq)
    for rows in groups.values():
        if len(rows) > 1:
            rows.sort(key=lambda seq: (-_output_class(seq), seq.request.prompt_ids.tobytes(), seq.seq_id))
    ordered = sorted(groups.values(), key=lambda rows: (-max(map(_output_length, rows)), rows[0].seq_id))
    return [seq for rows in ordered for seq in rows]


def _output_length(seq: Sequence) -> int:
    return seq.limit - len(seq.request.prompt_ids)


def _output_class(seq: Sequence) -> int:
    return _output_length(seq).bit_length()
