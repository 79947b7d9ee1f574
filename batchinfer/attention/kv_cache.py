"""Storage of keys and values: per layer [blocks, kv_heads, block_size, head_dim], so that a block of a head is contiguous."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchinfer.attention.base import AttnSpec


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How one token of one layer is stored."""

    name: str
    dtype: torch.dtype

    def bytes_per_token(self, spec: AttnSpec, num_layers: int) -> int:
        """Keys and values of all layers, in bytes."""
        return 2 * num_layers * spec.num_kv_heads * spec.head_dim * self.dtype.itemsize


KV_FORMATS = {"bf16": KVFormat("bf16", torch.bfloat16), "float32": KVFormat("float32", torch.float32)}


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's keys and values, each [blocks, kv_heads, block_size, head_dim]."""

    k: Tensor
    v: Tensor

    def write(self, cells: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [T, kv_heads, head_dim]; cells int64 [T * kv_heads] count rows of head_dim from the start of the cache."""
        dim = self.k.shape[-1]
        self.k.view(-1, dim).index_copy_(0, cells, k.reshape(-1, dim).to(self.k.dtype))
        self.v.view(-1, dim).index_copy_(0, cells, v.reshape(-1, dim).to(self.v.dtype))


class KVCache:
    """The pool of all layers. On the CPU its pages are zero and cost memory only once they are written."""

    def __init__(
        self, spec: AttnSpec, num_layers: int, num_blocks: int, block_size: int, kv_format: KVFormat, device: torch.device
    ) -> None:
        self.spec = spec
        self.block_size = block_size
        shape = (num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        self.layers = [LayerKV(_zeros(shape, kv_format.dtype, device), _zeros(shape, kv_format.dtype, device)) for _ in range(num_layers)]

    def clear(self, block_ids: np.ndarray) -> None:
        """Zero blocks whose contents may be no numbers: masked slots are still multiplied, and 0 times NaN is NaN."""
        where = torch.from_numpy(block_ids.astype(np.int64))
        for layer in self.layers:
            where = where.to(layer.k.device)
            layer.k[where] = 0
            layer.v[where] = 0


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zeroed tensor: unwritten slots are multiplied by a weight of zero, so they must hold no NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)  # fresh pages of the kernel, not touched
    return torch.from_numpy(raw).view(dtype).view(shape)
