"""Paged attention in plain torch, on any device: the oracle for native kernels and the fallback where there is none.

A query row's result is the same bits whoever else is in the batch, whether the row came in a prompt chunk or alone,
and however the cache is cut into blocks. Keys are reduced in tiles of `TILE` tokens at absolute positions, in
ascending order, with the running maximum and sum of FlashAttention (Dao et al., arXiv:2205.14135); every product is
float32 with a fixed inner shape, and rows are padded to multiples of 8, where the matrix kernels treat all rows alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from batchinfer.attention.base import Attend, AttnInputs, AttnSpec
from batchinfer.attention.kv_cache import KVCache
from batchinfer.ops.reference import rotary
from batchinfer.ops.rows import Product, to_dense

TILE = 64
ROWS = 8
MAX_TILE_FLOATS = 4 << 20  # of one gathered tile of keys: rows beyond are computed in a second pass


@dataclass(slots=True)
class _Gather:
    """Where a tile of some sequences lies: `index` int64 [n, blocks per tile], or with `part` (sub-blocks) [n]."""

    index: Tensor
    part: Tensor | None

    def take(self, read: Callable[[Tensor], Tensor]) -> Tensor:
        """The tile as float32 [n * kv_heads, TILE, head_dim]; `read` gives blocks as [N, kv_heads, size, head_dim]."""
        n, count = self.index.shape
        blocks = read(self.index.view(-1))
        heads, size, dim = blocks.shape[1:]
        if self.part is not None:
            parts = blocks.view(n, heads, size // TILE, TILE, dim)
            return parts[torch.arange(n, device=parts.device), :, self.part].reshape(-1, TILE, dim)
        return blocks.view(n, count, heads, size, dim).transpose(1, 2).reshape(-1, TILE, dim)


@dataclass(slots=True)
class _DecodeTile:
    """One key tile of the decoding rows that reach it (the longest come first)."""

    num_rows: int
    where: _Gather
    view: _View


@dataclass(slots=True)
class _DecodeGroup:
    rows: Tensor  # int64 [n], rows of the ragged batch
    tiles: list[_DecodeTile]


@dataclass(slots=True)
class _PrefillTile:
    first_row: int  # rows before it see nothing of the tile
    where: _Gather
    view: _View


@dataclass(slots=True)
class _PrefillSpan:
    begin: int
    num_tokens: int
    tiles: list[_PrefillTile]


@dataclass(slots=True)
class _View:
    """How far into a tile each row sees: `seen` int64 [rows], the tokens from the tile's start to the row's own."""

    seen: Tensor
    whole: bool  # every row sees the tile to its end

    def mask(self, window: int | None) -> Tensor | None:
        """0 where a row sees a token, else -inf, float32 [rows, TILE]; None where every row sees everything."""
        if self.whole and window is None:
            return None
        token = torch.arange(TILE, device=self.seen.device)
        visible = token < self.seen[:, None]
        if window is not None:
            visible &= token >= self.seen[:, None] - window
        return torch.zeros(visible.shape, device=self.seen.device).masked_fill_(~visible, -torch.inf)


class ReferenceAttention:
    """Gather, multiply, softmax, tile by tile."""

    def __init__(self, kv: KVCache, device: torch.device, dtype: torch.dtype) -> None:
        self._kv = kv
        self._dtype = dtype  # of activations
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

        written = self._to_device(inputs.write_block * self._kv.block_size + inputs.write_offset)

        def attend(layer: int, qkv: Product, cos: Tensor, sin: Tensor) -> Tensor:
            q, k, v = self._heads(to_dense(qkv, self._dtype))
            q, k = rotary(q, k, cos, sin)
            self._kv.write(layer, written, k, v)
            out = torch.empty(q.shape[0], self._spec.num_heads * self._spec.head_dim, dtype=q.dtype, device=q.device)
            for group in groups:
                out.index_copy_(0, group.rows, self._decode(layer, group, q.index_select(0, group.rows)).to(q.dtype))
            for span in spans:
                rows = slice(span.begin, span.begin + span.num_tokens)
                out[rows] = self._prefill(layer, span, q[rows]).to(q.dtype)
            return out

        return attend

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads, dim = self._spec.num_heads, self._spec.num_kv_heads, self._spec.head_dim
        q, k, v = torch.split(qkv, [heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
        return q.reshape(-1, heads, dim), k.reshape(-1, kv_heads, dim), v.reshape(-1, kv_heads, dim)

    def _score(self, query: Tensor, keys: Tensor) -> Tensor:
        scores = torch.bmm(query, keys.transpose(1, 2))
        cap = self._spec.softcap
        return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)

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
            tiles.append(_DecodeTile(n, self._locate(tables[:n], tile), self._view(lengths[:n] - tile * TILE)))
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
            tiles.append(_PrefillTile(first, self._locate(table, tile), self._view(positions[first:] + 1 - tile * TILE)))
        return _PrefillSpan(int(inputs.query_start[span]), count, tiles)

    def _view(self, seen: np.ndarray) -> _View:
        return _View(self._to_device(seen.astype(np.int64)), int(seen.min()) >= TILE)

    def _decode(self, layer: int, group: _DecodeGroup, q: Tensor) -> Tensor:
        """q [n, heads, D] -> float32 [n, heads * D]."""
        n, heads, dim = q.shape
        kv_heads, g, window = self._spec.num_kv_heads, self._group, self._spec.window(layer)
        padded = -(-g // ROWS) * ROWS
        items = n * kv_heads
        query = q.new_zeros((items, padded, dim), dtype=torch.float32)
        query[:, :g].copy_(q.view(items, g, dim)).mul_(self._spec.scale)
        weights = torch.zeros(items, padded, TILE, device=q.device)
        state = _Running(items, g, dim, q.device)
        for tile in group.tiles:
            m = tile.num_rows * kv_heads
            scores = self._score(query[:m], tile.where.take(partial(self._kv.read_keys, layer)))[:, :g]
            mask = tile.view.mask(window)
            if mask is not None:
                scores = (scores.view(tile.num_rows, kv_heads, g, TILE) + mask[:, None, None]).view(m, g, TILE)
            probabilities, shrink = state.advance(scores, m)
            weights[:m, :g] = probabilities
            state.add(torch.bmm(weights[:m], tile.where.take(partial(self._kv.read_values, layer)))[:, :g], shrink, m)
        return state.result().view(n, heads * dim)

    def _prefill(self, layer: int, span: _PrefillSpan, q: Tensor) -> Tensor:
        """q [n, heads, D] of one span -> float32 [n, heads * D]."""
        n, heads, dim = q.shape
        kv_heads, g, window = self._spec.num_kv_heads, self._group, self._spec.window(layer)
        rows = n * g
        padded = -(-rows // ROWS) * ROWS
        query = q.new_zeros((kv_heads, padded, dim), dtype=torch.float32)
        query[:, :rows] = q.view(n, kv_heads, g, dim).transpose(0, 1).reshape(kv_heads, rows, dim).float() * self._spec.scale
        state = _Running(kv_heads, padded, dim, q.device)
        for tile in span.tiles:
            f = tile.first_row
            scores = self._score(query[:, f:], tile.where.take(partial(self._kv.read_keys, layer)))
            mask = tile.view.mask(window)
            if mask is not None:
                scores += mask
            probabilities, shrink = state.advance(scores, kv_heads, f)
            state.add(torch.bmm(probabilities, tile.where.take(partial(self._kv.read_values, layer))), shrink, kv_heads, f)
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
        level = torch.where(highest == -torch.inf, 0.0, highest)  # a row outside whose window all of the tile lies
        weights = (scores - level).exp_()
        shrink = (before - level).exp_()
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
