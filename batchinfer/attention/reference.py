"""Paged attention in plain torch, on any device: the oracle for native kernels and the fallback where there is none.

A query row's result is the same bits whoever else is in the batch, whether the row came in a prompt chunk or alone,
and however the cache is cut into blocks. Keys are reduced in tiles of `TILE` tokens at absolute positions, in
ascending order, with the running maximum and sum of FlashAttention (Dao et al., arXiv:2205.14135); every product is
float32 with a fixed inner shape, and rows are padded to multiples of 8, where the matrix kernels treat all rows alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchinfer.attention.base import Attend, AttnInputs, AttnSpec
from batchinfer.attention.kv_cache import KVCache, LayerKV

TILE = 64
ROWS = 8
MAX_TILE_FLOATS = 4 << 20  # of one gathered tile of keys: rows beyond are computed in a second pass


@dataclass(slots=True)
class _Gather:
    """Where a tile of some sequences lies: `index` int64 [n, blocks per tile], or with `part` (sub-blocks) [n]."""

    index: Tensor
    part: Tensor | None

    def take(self, cache: Tensor) -> Tensor:
        """The tile as float32 [n * kv_heads, TILE, head_dim]."""
        heads, size, dim = cache.shape[1:]
        if self.part is not None:
            parts = cache.view(len(cache), heads, size // TILE, TILE, dim)
            return parts[self.index[:, 0], :, self.part].float().view(-1, TILE, dim)
        n, count = self.index.shape
        blocks = cache.index_select(0, self.index.view(-1)).view(n, count, heads, size, dim)
        tile = torch.empty(n, heads, count, size, dim, device=cache.device)
        return tile.copy_(blocks.transpose(1, 2)).view(-1, TILE, dim)


@dataclass(slots=True)
class _DecodeTile:
    """One key tile of the decoding rows that reach it (the longest come first)."""

    num_rows: int
    where: _Gather
    mask: Tensor | None  # float32 [n, 1, 1, TILE]: 0 or -inf; None where every row sees the whole tile


@dataclass(slots=True)
class _DecodeGroup:
    rows: Tensor  # int64 [n], rows of the ragged batch
    tiles: list[_DecodeTile]


@dataclass(slots=True)
class _PrefillTile:
    first_row: int  # rows before it see nothing of the tile
    where: _Gather
    mask: Tensor | None  # float32 [rows, TILE]


@dataclass(slots=True)
class _PrefillSpan:
    begin: int
    num_tokens: int
    tiles: list[_PrefillTile]


class ReferenceAttention:
    """Gather, multiply, softmax, tile by tile."""

    def __init__(self, kv: KVCache, device: torch.device) -> None:
        self._kv = kv
        self._spec: AttnSpec = kv.spec
        self._device = device
        self._group = kv.spec.num_heads // kv.spec.num_kv_heads
        self._blocks_per_tile = max(1, TILE // kv.block_size)
        self._max_rows = max(1, MAX_TILE_FLOATS // (kv.spec.num_kv_heads * TILE * kv.spec.head_dim))

    def bind(self, inputs: AttnInputs) -> Attend:
        """Plan the step: which tiles of which rows, and their masks."""
        single = np.flatnonzero(inputs.num_tokens == 1)
        lengths = inputs.start[single] + 1
        order = single[np.argsort(-lengths, kind="stable")]
        groups = [self._plan_decode(inputs, order[i : i + self._max_rows]) for i in range(0, len(order), self._max_rows)]
        spans = [self._plan_prefill(inputs, int(i)) for i in np.flatnonzero(inputs.num_tokens > 1)]

        heads = np.arange(self._spec.num_kv_heads)
        cells = (inputs.write_block[:, None] * self._spec.num_kv_heads + heads) * self._kv.block_size + inputs.write_offset[:, None]
        written = self._to_device(cells.reshape(-1))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kv = self._kv.layers[layer]
            kv.write(written, k, v)
            out = torch.empty(q.shape[0], self._spec.num_heads * self._spec.head_dim, dtype=q.dtype, device=q.device)
            for group in groups:
                out.index_copy_(0, group.rows, self._decode(kv, group, q.index_select(0, group.rows)).to(q.dtype))
            for span in spans:
                rows = slice(span.begin, span.begin + span.num_tokens)
                out[rows] = self._prefill(kv, span, q[rows]).to(q.dtype)
            return out

        return attend

    def _locate(self, tables: np.ndarray, tile: int) -> _Gather:
        """Blocks of one tile; columns past the table's end are the null block, and masked."""
        size = self._kv.block_size
        if size <= TILE:
            first = tile * self._blocks_per_tile
            index = tables[:, first : first + self._blocks_per_tile]
            short = self._blocks_per_tile - index.shape[1]
            if short:
                index = np.pad(index, ((0, 0), (0, short)))
            return _Gather(self._to_device(index.astype(np.int64)), None)
        per_block = size // TILE
        index = tables[:, tile // per_block : tile // per_block + 1]
        return _Gather(self._to_device(index.astype(np.int64)), self._to_device(np.full(len(tables), tile % per_block)))

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def _plan_decode(self, inputs: AttnInputs, spans: np.ndarray) -> _DecodeGroup:
        lengths = inputs.start[spans] + 1
        tables = inputs.block_table[inputs.slots[spans]]
        tiles = []
        for tile in range(-(-int(lengths[0]) // TILE)):
            n = int(np.count_nonzero(lengths > tile * TILE))
            seen = lengths[:n, None, None, None] - tile * TILE
            mask = None
            if int(seen.min()) < TILE:
                mask = self._to_device(np.where(np.arange(TILE) < seen, np.float32(0), np.float32(-np.inf)))
            tiles.append(_DecodeTile(n, self._locate(tables[:n], tile), mask))
        return _DecodeGroup(self._to_device(inputs.query_start[spans]), tiles)

    def _plan_prefill(self, inputs: AttnInputs, span: int) -> _PrefillSpan:
        start, count = int(inputs.start[span]), int(inputs.num_tokens[span])
        table = inputs.block_table[inputs.slots[span]][None]
        padded = -(-count * self._group // ROWS) * ROWS
        # Row r is query r // group; padding rows repeat the last query's view.
        positions = start + np.minimum(np.arange(padded) // self._group, count - 1)
        tiles = []
        for tile in range(-(-(start + count) // TILE)):
            first = max(0, tile * TILE - start) * self._group // ROWS * ROWS
            mask = None
            if (tile + 1) * TILE > start + 1:
                seen = positions[first:, None] + 1 - tile * TILE
                mask = self._to_device(np.where(np.arange(TILE) < seen, np.float32(0), np.float32(-np.inf)))
            tiles.append(_PrefillTile(first, self._locate(table, tile), mask))
        return _PrefillSpan(int(inputs.query_start[span]), count, tiles)

    def _decode(self, kv: LayerKV, group: _DecodeGroup, q: Tensor) -> Tensor:
        """q [n, heads, D] -> float32 [n, heads * D]."""
        n, heads, dim = q.shape
        kv_heads, g = self._spec.num_kv_heads, self._group
        padded = -(-g // ROWS) * ROWS
        items = n * kv_heads
        query = q.new_zeros((items, padded, dim), dtype=torch.float32)
        query[:, :g].copy_(q.view(items, g, dim)).mul_(self._spec.scale)
        weights = torch.zeros(items, padded, TILE, device=q.device)
        state = _Running(items, g, dim, q.device)
        for tile in group.tiles:
            m = tile.num_rows * kv_heads
            scores = torch.bmm(query[:m], tile.where.take(kv.k).transpose(1, 2))[:, :g]
            if tile.mask is not None:
                scores = (scores.view(tile.num_rows, kv_heads, g, TILE) + tile.mask).view(m, g, TILE)
            probabilities, shrink = state.advance(scores, m)
            weights[:m, :g] = probabilities
            state.add(torch.bmm(weights[:m], tile.where.take(kv.v))[:, :g], shrink, m)
        return state.result().view(n, heads * dim)

    def _prefill(self, kv: LayerKV, span: _PrefillSpan, q: Tensor) -> Tensor:
        """q [n, heads, D] of one span -> float32 [n, heads * D]."""
        n, heads, dim = q.shape
        kv_heads, g = self._spec.num_kv_heads, self._group
        rows = n * g
        padded = -(-rows // ROWS) * ROWS
        query = q.new_zeros((kv_heads, padded, dim), dtype=torch.float32)
        query[:, :rows] = q.view(n, kv_heads, g, dim).transpose(0, 1).reshape(kv_heads, rows, dim).float() * self._spec.scale
        state = _Running(kv_heads, padded, dim, q.device)
        for tile in span.tiles:
            f = tile.first_row
            scores = torch.bmm(query[:, f:], tile.where.take(kv.k).transpose(1, 2))
            if tile.mask is not None:
                scores += tile.mask
            probabilities, shrink = state.advance(scores, kv_heads, f)
            state.add(torch.bmm(probabilities, tile.where.take(kv.v)), shrink, kv_heads, f)
        out = state.result()[:, :rows].view(kv_heads, n, g, dim)
        return out.transpose(0, 1).reshape(n, heads * dim)


class _Running:
    """Running maximum, sum and weighted values of rows [items, rows]; all float32."""

    def __init__(self, items: int, rows: int, dim: int, device: torch.device) -> None:
        self._max = torch.full((items, rows, 1), -torch.inf, device=device)
        self._sum = torch.zeros((items, rows, 1), device=device)
        self._out = torch.zeros((items, rows, dim), device=device)

    def advance(self, scores: Tensor, items: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Take one tile of scores [items, rows, TILE]; returns its unnormalised weights and the factor for what was summed before."""
        before = self._max[:items, first:]
        highest = torch.maximum(before, scores.amax(-1, keepdim=True))
        weights = (scores - highest).exp_()
        shrink = (before - highest).exp_()
        total = self._sum[:items, first:]
        total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        before.copy_(highest)
        return weights, shrink

    def add(self, values: Tensor, shrink: Tensor, items: int, first: int = 0) -> None:
        """Add the tile's weighted values [items, rows, dim]."""
        self._out[:items, first:].mul_(shrink).add_(values)

    def result(self) -> Tensor:
        """Normalised values [items, rows, dim]."""
        return self._out / self._sum
