"""Storage of keys and values: formats, the order of elements within a block, and the pool of all layers.

A block of one head is contiguous, keys and values apart. On the CPU its elements lie as the kernels read them: keys
[size / 16, D / p, 16, p], values [size / p, D, p], where p elements fill 32 bits, so that one vector holds the same
part of 16 keys, or the same p tokens of 16 columns. Scales, where the format has them, follow their block.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchinfer.attention.base import AttnSpec

SCALE_BYTES = 4
ZERO_POINT = 128
LANES = 16  # keys that lie side by side


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How one head of one token is stored: plain numbers, or 8-bit codes with one float32 scale."""

    name: str
    dtype: torch.dtype
    scaled: bool

    def bytes_per_head(self, head_dim: int) -> int:
        """Bytes of one head of one token, keys or values, scale included."""
        return head_dim * self.dtype.itemsize + SCALE_BYTES * self.scaled

    def bytes_per_token(self, spec: AttnSpec, num_layers: int) -> int:
        """Keys and values of all layers, in bytes."""
        return 2 * num_layers * spec.num_kv_heads * self.bytes_per_head(spec.head_dim)


KV_FORMATS = {
    "bf16": KVFormat("bf16", torch.bfloat16, scaled=False),
    "float32": KVFormat("float32", torch.float32, scaled=False),
    "int8": KVFormat("int8", torch.uint8, scaled=True),
}


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """A block of one head in memory: `pack` elements fill 32 bits, `lanes` keys lie side by side."""

    size: int  # tokens
    head_dim: int
    pack: int
    lanes: int

    @classmethod
    def choose(cls, kv_format: KVFormat, size: int, head_dim: int, device: torch.device) -> BlockLayout:
        """The kernels' order on a CPU where the sizes allow it, else plain rows."""
        pack = 4 // kv_format.dtype.itemsize
        if device.type == "cpu" and size % LANES == 0 and head_dim % pack == 0:
            return cls(size, head_dim, pack, LANES)
        return cls(size, head_dim, 1, 1)

    def places(self, keys: bool) -> Tensor:
        """Where each element lies, counted in elements: int64 [size, head_dim]."""
        t, d = torch.arange(self.size)[:, None], torch.arange(self.head_dim)[None]
        p, n = self.pack, self.lanes
        if keys:
            return ((t // n * (self.head_dim // p) + d // p) * n + t % n) * p + d % p
        return (t // p * self.head_dim + d) * p + t % p


class LayerKV:
    """One layer's keys and values, raw: uint8 [blocks, kv_heads, bytes of a block of one head] each."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k = k
        self.v = v


class KVCache:
    """The pool of all layers. On the CPU its pages are zero and cost memory only once they are written."""

    def __init__(
        self, spec: AttnSpec, num_layers: int, num_blocks: int, block_size: int, kv_format: KVFormat, device: torch.device
    ) -> None:
        self.spec = spec
        self.block_size = block_size
        self.format = kv_format
        self.layout = BlockLayout.choose(kv_format, block_size, spec.head_dim, device)
        shape = (num_blocks, spec.num_kv_heads, block_size * kv_format.bytes_per_head(spec.head_dim))
        self.layers = [LayerKV(_zeros(shape, device), _zeros(shape, device)) for _ in range(num_layers)]
        self._key_places = self.layout.places(keys=True).to(device)
        self._value_places = self.layout.places(keys=False).to(device)

    def clear(self, block_ids: np.ndarray) -> None:
        """Zero blocks whose contents may be no numbers: masked slots are still multiplied, and 0 times NaN is NaN."""
        where = torch.from_numpy(block_ids.astype(np.int64))
        for layer in self.layers:
            where = where.to(layer.k.device)
            layer.k[where] = 0
            layer.v[where] = 0

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks: pairs of the one to read and the one to write, which no pair reads."""
        if not copies:
            return
        source, target = torch.tensor(copies, device=self.layers[0].k.device).unbind(1)
        for layer in self.layers:
            layer.k[target] = layer.k[source]
            layer.v[target] = layer.v[source]

    def write(self, layer: int, cells: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [T, kv_heads, D] of tokens at cells int64 [T] (block * block_size + place in the block)."""
        kv = self.layers[layer]
        self._write(kv.k, self._key_places, cells, k)
        self._write(kv.v, self._value_places, cells, v)

    def read_keys(self, layer: int, block_ids: Tensor) -> Tensor:
        """Keys of blocks int64 [N] as float32 [N, kv_heads, size, D]."""
        return self._read(self.layers[layer].k, self._key_places, block_ids)

    def read_values(self, layer: int, block_ids: Tensor) -> Tensor:
        """Values of blocks int64 [N] as float32 [N, kv_heads, size, D]."""
        return self._read(self.layers[layer].v, self._value_places, block_ids)

    def _write(self, raw: Tensor, places: Tensor, cells: Tensor, rows: Tensor) -> None:
        heads, size = self.spec.num_kv_heads, self.block_size
        block, place = cells // size, cells % size
        first = (block[:, None] * heads + torch.arange(heads, device=raw.device)) * raw.shape[2]  # bytes [T, heads]
        item = self.format.dtype.itemsize
        where = (first // item)[..., None] + places[place][:, None]
        if not self.format.scaled:
            raw.view(-1).view(self.format.dtype).index_put_((where,), rows.to(self.format.dtype))
            return
        codes, scale = quantise_heads(rows)
        raw.view(-1).index_put_((where,), codes)
        scale_place = (first + size * self.spec.head_dim) // SCALE_BYTES + place[:, None]
        raw.view(-1).view(torch.float32).index_put_((scale_place,), scale)

    def _read(self, raw: Tensor, places: Tensor, block_ids: Tensor) -> Tensor:
        size, dim = self.block_size, self.spec.head_dim
        blocks = raw.index_select(0, block_ids)
        codes = blocks[..., : size * dim * self.format.dtype.itemsize].view(self.format.dtype)
        rows = codes.index_select(-1, places.view(-1)).view(*codes.shape[:2], size, dim).float()
        if not self.format.scaled:
            return rows
        scale = blocks[..., size * dim :].contiguous().view(torch.float32)
        return (rows - ZERO_POINT) * scale[..., None]


def quantise_heads(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows [T, heads, D] as (uint8 codes with zero point 128, float32 scales [T, heads]): row = (code - 128) * scale."""
    wide = rows.float()
    largest = wide.abs().amax(-1)
    inverse = torch.where(largest > 0, 127.0 / largest, 0.0)
    codes = torch.round(wide * inverse[..., None]).nan_to_num_(0.0).add_(ZERO_POINT)
    return codes.to(torch.uint8), largest / 127.0


def _zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Zeroed bytes: unwritten slots are multiplied by a weight of zero, so they must hold no NaN.

    On the CPU they are fresh pages of the kernel, large ones where it has them: a decode step jumps between blocks, and
    every jump to another small page costs a walk through the page tables.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    pages = mmap.mmap(-1, max(1, int(np.prod(shape))), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages: slower, nothing else
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(shape)
