"""KV memory that is not paged: one slab of consecutive blocks for each request, long enough for the longest, from its start to its end."""

from __future__ import annotations

import numpy as np

from batchinfer.core.block_pool import NULL_BLOCK


class ContiguousPool:
    """Hands out and takes back whole slabs. Slab i is the blocks from 1 + i * slab_blocks on; block 0 is the null block.

    Nothing is shared and nothing is remembered, so a block is in use or blank.
    """

    def __init__(self, num_slabs: int, slab_blocks: int) -> None:
        self.num_blocks = 1 + num_slabs * slab_blocks
        self.slab_blocks = slab_blocks
        self.refs = np.zeros(self.num_blocks, np.int32)
        self.refs[NULL_BLOCK] = 1
        self._free = list(range(num_slabs - 1, -1, -1))  # a stack of slabs: low ones go first

    @property
    def num_free(self) -> int:
        """Blocks of the slabs that can be handed out now."""
        return len(self._free) * self.slab_blocks

    @property
    def num_blank(self) -> int:
        """The same: no slab is remembered for what it holds."""
        return self.num_free

    @property
    def num_used(self) -> int:
        """Blocks of the slabs that sequences hold, whatever they have written."""
        return self.num_blocks - 1 - self.num_free

    def reservation(self, num_blocks: int) -> int:
        """Blocks to take for a sequence that enters and needs `num_blocks` now: a slab, always."""
        assert num_blocks <= self.slab_blocks, "a sequence is longer than a slab"
        return self.slab_blocks

    def try_allocate(self, count: int) -> np.ndarray | None:
        """Return the ids of a slab's blocks, int64, in order, with one reference each, or None when no slab is free."""
        assert count == self.slab_blocks, "only whole slabs are handed out"
        if not self._free:
            return None
        first = 1 + self._free.pop() * self.slab_blocks
        ids = np.arange(first, first + self.slab_blocks)
        self.refs[ids] = 1
        return ids

    def share(self, block_ids: np.ndarray) -> None:
        """Slabs have one holder."""
        assert not len(block_ids), "a slab cannot be shared"

    def release(self, block_ids: np.ndarray) -> None:
        """Take back the slabs that these blocks, all of each, make up."""
        self.refs[block_ids] = 0
        self._free.extend(np.unique((block_ids - 1) // self.slab_blocks)[::-1].tolist())

    def discard(self, block_ids: np.ndarray) -> np.ndarray:
        """Those of the (distinct) blocks that nobody holds; they are blank already."""
        free: np.ndarray = block_ids[self.refs[block_ids] == 0]
        return free

    def check(self, holders: np.ndarray) -> None:
        """Assert that `holders` (block ids, one entry per holder, each sequence's in order) are whole slabs, held once each."""
        slabs = holders.reshape(-1, self.slab_blocks)
        assert not ((slabs[:, :1] - 1) % self.slab_blocks).any(), "a sequence's blocks do not begin with a slab"
        assert (np.diff(slabs, axis=1) == 1).all(), "a sequence's blocks are not consecutive"
        expected = np.zeros(self.num_blocks, np.int32)
        expected[NULL_BLOCK] = 1
        np.add.at(expected, holders, 1)
        assert np.array_equal(self.refs, expected), "references differ from what the sequences hold"
        assert expected.max() == 1, "a block is held twice"
        free = np.array(self._free, np.int64)
        assert len(np.unique(free)) == len(free), "a slab is free twice"
        assert not self.refs[1 + free * self.slab_blocks].any(), "a free slab is held"
        assert len(free) + len(slabs) == (self.num_blocks - 1) // self.slab_blocks, "a slab is lost"
