"""The KV blocks: reference counts, and the least recently used order of those that the prefix cache still knows.

Every block is in exactly one state: in use (`refs > 0`), reusable (no references, but keyed in the prefix cache) or
blank. Block 0 is the null block, which padding may write to; it is never handed out. All operations take arrays
(int64, NumPy's index type), so a step makes a handful of calls whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

NULL_BLOCK = 0


class KVPool(Protocol):
    """What the memory needs of a pool of blocks."""

    num_blocks: int  # the null block included
    refs: np.ndarray  # int32 [num_blocks]

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""

    def reservation(self, num_blocks: int) -> int:
        """Blocks to take for a sequence that enters and needs `num_blocks` now."""

    def try_allocate(self, count: int) -> np.ndarray | None:
        """Return `count` block ids, int64, with one reference each, or None when there are too few."""

    def share(self, block_ids: np.ndarray) -> None:
        """Add a reference to each of the (distinct) blocks."""

    def release(self, block_ids: np.ndarray) -> None:
        """Drop one reference per entry."""

    def discard(self, block_ids: np.ndarray) -> np.ndarray:
        """Make those of the (distinct) blocks that nobody holds blank, and return them."""

    def check(self, holders: np.ndarray) -> None:
        """Assert the pool's invariants; `holders` are block ids, one entry per holder."""


class BlockPool:
    """Hands out and takes back block ids.

    Reusable blocks stand in a ring of (block) entries in order of release; an entry is live while `_stamp[block]` is
    its position, so that taking a block out of the middle (a cache hit) costs nothing.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = np.zeros(num_blocks, np.int32)
        self.refs[NULL_BLOCK] = 1
        self.keyed = np.zeros(num_blocks, bool)
        self.forget: Callable[[list[int]], None] = lambda block_ids: None  # the prefix cache listens here
        self._blank = np.arange(num_blocks - 1, 0, -1)  # a stack: low ids go first
        self._num_blank = num_blocks - 1
        self._ring = np.zeros(2 * num_blocks + 16, np.int64)
        self._head = self._tail = 0  # positions in the ring's whole history
        self._offset = 0  # history position of _ring[0]
        self._stamp = np.full(num_blocks, -1, np.int64)
        self._num_reusable = 0
        self._place = np.zeros(num_blocks, np.int64)  # scratch of `release`

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return self._num_blank + self._num_reusable

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - 1 - self.num_free

    def reservation(self, num_blocks: int) -> int:
        """Blocks to take for a sequence that enters and needs `num_blocks` now: no more than that."""
        return num_blocks

    def try_allocate(self, count: int) -> np.ndarray | None:
        """Return `count` block ids, int64, with one reference each, or None when there are too few."""
        if count > self.num_free:
            return None
        if count > self._num_blank:
            # A little more than asked for: in a full pool every join would otherwise pay for an eviction of its own.
            spare = min(self._num_reusable, count - self._num_blank + self.num_blocks // 256)
            self._set_blank(self._evict(spare))
        self._num_blank -= count
        ids = self._blank[self._num_blank : self._num_blank + count][::-1].copy()
        self.refs[ids] = 1
        return ids

    def share(self, block_ids: np.ndarray) -> None:
        """Add a reference to each of the (distinct) blocks."""
        if not len(block_ids):
            return
        refs = self.refs[block_ids]
        self._num_reusable -= len(refs) - int(np.count_nonzero(refs))
        self.refs[block_ids] = refs + 1

    def release(self, block_ids: np.ndarray) -> None:
        """Drop one reference per entry; a block held by two of the releasing rows stands twice.

        The caller lists each row's blocks tail first, so that eviction drops a prefix from its end.
        """
        place = np.arange(len(block_ids))
        self._place[block_ids] = place  # of a block listed twice the last entry stays, and counts: it reaches zero once
        is_last = self._place[block_ids] == place
        if is_last.all():
            self.refs[block_ids] -= 1
        else:
            np.subtract.at(self.refs, block_ids, 1)
        freed = block_ids[is_last & (self.refs[block_ids] == 0)]
        keyed = self.keyed[freed]
        self._set_blank(freed[~keyed])
        self._push(freed[keyed])

    def discard(self, block_ids: np.ndarray) -> np.ndarray:
        """Make those of the (distinct) blocks that nobody holds blank: what they store is not to be used. Returns them."""
        free: np.ndarray = block_ids[self.refs[block_ids] == 0]
        keyed = free[self.keyed[free]]
        self._num_reusable -= len(keyed)
        self.keyed[keyed] = False
        self._stamp[keyed] = -1
        self.forget(keyed.tolist())
        self._set_blank(keyed)
        return free

    def _set_blank(self, block_ids: np.ndarray) -> None:
        self._blank[self._num_blank : self._num_blank + len(block_ids)] = block_ids
        self._num_blank += len(block_ids)

    def _push(self, block_ids: np.ndarray) -> None:
        count = len(block_ids)
        if self._tail - self._offset + count > len(self._ring):
            self._compact()
        start = self._tail - self._offset
        self._ring[start : start + count] = block_ids
        self._stamp[block_ids] = np.arange(self._tail, self._tail + count)
        self._tail += count
        self._num_reusable += count

    def _live(self, low: int, high: int) -> np.ndarray:
        """Entries of the ring's history [low, high) that still stand for a reusable block."""
        ids: np.ndarray = self._ring[low - self._offset : high - self._offset]
        live: np.ndarray = ids[(self._stamp[ids] == np.arange(low, high)) & (self.refs[ids] == 0)]
        return live

    def _compact(self) -> None:
        live = self._live(self._head, self._tail)
        self._ring[: len(live)] = live
        self._stamp[live] = np.arange(self._tail, self._tail + len(live))
        self._offset = self._head = self._tail
        self._tail += len(live)

    def _evict(self, count: int) -> np.ndarray:
        """Take the `count` blocks released longest ago out of the cache."""
        parts, found, window = [], 0, max(64, 2 * count)
        while found < count:
            high = min(self._head + window, self._tail)
            assert high > self._head, "fewer reusable blocks than counted"
            ids = self._live(self._head, high)
            if found + len(ids) > count:
                ids = ids[: count - found]
                high = int(self._stamp[ids[-1]]) + 1
            self._head = high
            parts.append(ids)
            found += len(ids)
        evicted = np.concatenate(parts) if len(parts) > 1 else parts[0]
        self._num_reusable -= count
        self.keyed[evicted] = False
        self._stamp[evicted] = -1
        self.forget(evicted.tolist())
        return evicted

    def check(self, holders: np.ndarray) -> None:
        """Assert the partition and that the references are exactly `holders` (block ids, one entry per holder)."""
        expected = np.bincount(holders, minlength=self.num_blocks).astype(np.int32)
        expected[NULL_BLOCK] += 1
        assert np.array_equal(self.refs, expected), "reference counts differ from what the sequences hold"
        blank = self._blank[: self._num_blank]
        reusable = self._live(self._head, self._tail)
        assert len(reusable) == self._num_reusable, (len(reusable), self._num_reusable)
        free = np.concatenate((blank, reusable))
        assert len(np.unique(free)) == len(free), "a block is free twice"
        assert not self.refs[free].any(), "a free block is referenced"
        assert len(free) + np.count_nonzero(self.refs) == self.num_blocks, "a block is lost"
        assert self.keyed[reusable].all(), "a reusable block has no key"
        assert not self.keyed[blank].any(), "a blank block has a key"
