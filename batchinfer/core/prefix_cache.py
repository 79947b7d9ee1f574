"""Which blocks hold the KV of which tokens: reuse of computed prefixes between rows.

A key is (serial of the parent block, the block's token bytes). A serial is given once and never again, so equal keys
mean equal tokens all the way to the root: the comparison of tokens is the dictionary's own, and no hash is trusted.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from batchinfer.core.block_pool import BlockPool
from batchinfer.core.sequences import Sequence

Key = tuple[int, bytes]
ROOT = 0
_NO_BLOCKS = np.empty(0, np.int64)


class Probe(NamedTuple):
    """What the cache could give a sequence now."""

    num_blocks: int  # leading blocks that could be reused
    num_in_use: int  # of those, blocks that running rows hold already: reusing them takes no memory
    missing: Key | None  # the next full block of the prompt, None when there is none
    pending: bool  # another running row computes that block


NOTHING = Probe(0, 0, None, False)


class PrefixCache(Protocol):
    """Lookup and publication of full blocks."""

    def probe(self, seq: Sequence) -> Probe:
        """What could be reused; changes nothing."""

    def match(self, seq: Sequence) -> np.ndarray:
        """Ids of those leading blocks, int64; remembers the chain, and the next block as being computed by `seq`."""

    def publish(self, seq: Sequence, block_ids: np.ndarray, first: int, token_ids: np.ndarray) -> None:
        """Offer full, computed blocks: `block_ids` are the sequence's blocks from index `first` on, with their tokens."""

    def withdraw(self, seq: Sequence) -> None:
        """The sequence leaves: nobody waits for it any longer."""

    def check(self) -> None:
        """Assert the cache's own invariants."""


class NoPrefixCache:
    """Nothing is reused."""

    def probe(self, seq: Sequence) -> Probe:
        """Find nothing."""
        return NOTHING

    def match(self, seq: Sequence) -> np.ndarray:
        """Find nothing."""
        return _NO_BLOCKS

    def publish(self, seq: Sequence, block_ids: np.ndarray, first: int, token_ids: np.ndarray) -> None:
        """Remember nothing."""

    def withdraw(self, seq: Sequence) -> None:
        """Nobody waits."""

    def check(self) -> None:
        """Nothing can be wrong."""


class TriePrefixCache:
    """Every published block, reachable through its parent's serial, until the pool takes it for something else."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._block_of: dict[Key, int] = {}
        self._key_of: list[Key | None] = [None] * pool.num_blocks  # by block
        self._serial_of = [ROOT] * pool.num_blocks  # by block: of the key that it has
        self._next_serial = ROOT + 1
        self._pending: dict[Key | None, int] = {}  # key -> seq_id of the row that computes it
        pool.forget = self.forget

    def _walk(self, seq: Sequence) -> tuple[list[int], int, Key | None]:
        """(blocks, serial of the last, key of the first missing full block of the prompt); never covers the last token."""
        if seq.request.params.prompt_logprobs is not None and not seq.choice:  # every token of the prompt must go through the model
            return [], ROOT, None
        step = 4 * self._block_size
        token_ids = seq.token_ids()
        data = token_ids.tobytes()
        found: list[int] = []
        serial = ROOT
        block_of, serial_of = self._block_of, self._serial_of
        # The last token is always computed, because its logits are needed: only blocks that end before it count.
        for begin in range(0, (len(token_ids) - 1) // self._block_size * step, step):
            key = (serial, data[begin : begin + step])
            block_id = block_of.get(key)
            if block_id is None:  # blocks with generated tokens are not published: nobody may wait for one
                return found, serial, key if begin + step <= 4 * len(seq.request.prompt_ids) else None
            found.append(block_id)
            serial = serial_of[block_id]
        return found, serial, None

    def probe(self, seq: Sequence) -> Probe:
        """What could be reused; changes nothing."""
        found, _, missing = self._walk(seq)
        in_use = int(np.count_nonzero(self._pool.refs[found])) if found else 0
        return Probe(len(found), in_use, missing, missing in self._pending)

    def match(self, seq: Sequence) -> np.ndarray:
        """Ids of the leading blocks to reuse, int64; later rows with the same next block wait for this one."""
        found, seq.chain, missing = self._walk(seq)
        if missing is not None:
            self._claim(seq, missing)
        return np.array(found, np.int64) if found else _NO_BLOCKS

    def publish(self, seq: Sequence, block_ids: np.ndarray, first: int, token_ids: np.ndarray) -> None:
        """Offer full, computed blocks; a block whose tokens are known already stays the sequence's own, unkeyed."""
        self.withdraw(seq)
        step = 4 * self._block_size
        data = token_ids.tobytes()
        serial = seq.chain
        block_of, key_of, serial_of, keyed = self._block_of, self._key_of, self._serial_of, self._pool.keyed
        for index, block_id in enumerate(block_ids.tolist()):
            key = (serial, data[index * step : (index + 1) * step])
            known = block_of.get(key)
            if known is not None:
                serial = serial_of[known]
                continue
            serial = serial_of[block_id] = self._next_serial
            self._next_serial += 1
            block_of[key] = block_id
            key_of[block_id] = key
            keyed[block_id] = True
        seq.chain = serial
        begin = (first + len(block_ids)) * self._block_size
        if begin + self._block_size <= len(seq.request.prompt_ids):  # the rest of a long prefix is computed once, too
            self._claim(seq, (serial, seq.request.prompt_ids[begin : begin + self._block_size].tobytes()))

    def _claim(self, seq: Sequence, key: Key) -> None:
        """Let later rows wait for `seq` to compute this block."""
        if key not in self._pending and key not in self._block_of:
            self._pending[key] = seq.seq_id
            seq.pending_key = key

    def withdraw(self, seq: Sequence) -> None:
        """Nobody waits for the sequence's next block any longer."""
        if seq.pending_key is not None:
            del self._pending[seq.pending_key]
            seq.pending_key = None

    def forget(self, block_ids: list[int]) -> None:
        """The pool is about to reuse these blocks."""
        for block_id in block_ids:
            key = self._key_of[block_id]
            assert key is not None
            del self._block_of[key]
            self._key_of[block_id] = None

    def check(self) -> None:
        """Assert that the tables describe the same blocks and that the pool knows them as keyed."""
        known = {block_id: key for block_id, key in enumerate(self._key_of) if key is not None}
        assert len(self._block_of) == len(known)
        assert all(self._block_of[key] == block_id for block_id, key in known.items())
        assert len({self._serial_of[block_id] for block_id in known}) == len(known), "two blocks have one serial"
        assert list(known) == np.flatnonzero(self._pool.keyed).tolist()
