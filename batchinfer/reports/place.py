"""Where a job would run: this machine, or a GPU from the table. Memory, formats and the engine's limits there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from batchinfer.errors import CapacityError, ConfigError
from batchinfer.model.footprint import Footprint
from batchinfer.reports.gpus import MEMORY_SHARE, Gpu
from batchinfer.reports.lengths import RowLengths

if TYPE_CHECKING:
    from batchinfer.build import ModelHandle
    from batchinfer.config import EngineConfig
    from batchinfer.core.admission import EngineLimits


@dataclass(frozen=True, slots=True)
class Place:
    """A device, a model's formats on it, and what an engine could hold there."""

    device: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    weight_bytes: int
    free_bytes: int  # for weights, KV and all else
    kv_budget: int  # bytes that the KV pool may take
    limits: EngineLimits
    reason: str  # why the pool is as large as it is
    paged: bool  # False: every answer has room for a whole context
    shares_prompts: bool  # several answers to a row hold its prompt once

    def rows_at_once(self, lengths: RowLengths, pool_tokens: int) -> int:
        """Rows of average length, with all their answers, that fit into a pool."""
        answers = lengths.num_answers / len(lengths)
        each = float(lengths.held(self.shares_prompts).mean()) if self.paged else self.limits.max_model_len * answers
        return int(min(max(1, self.limits.max_num_seqs // answers), len(lengths), max(1, pool_tokens // max(1, round(each)))))


@dataclass(frozen=True, slots=True)
class KVFit:
    """What the job's keys and values need in one format, and how much of that fits."""

    dtype: str
    bytes_per_token: int
    blocks_needed: int  # for as many of the longest answers as may run at once; rows share nothing with others
    bytes_needed: int
    blocks_that_fit: int
    rows_at_once: int  # of average length, were all to use their max_tokens


def this_machine(config: EngineConfig, model: ModelHandle, lengths: RowLengths) -> Place:
    """By the rules that the engine is built with."""
    import torch

    from batchinfer.build import JobNeed, batch_sizes, compute_target, engine_limits, kv_dtype_of, weight_footprint
    from batchinfer.runtime.pool_size import CPU_SHARE, CUDA_SHARE, free_bytes

    target = compute_target(config, model)
    seqs = batch_sizes(config, target)["max_num_seqs"]
    limits, pool = engine_limits(config, model, target, JobNeed(int(np.sort(lengths.per_answer())[::-1][:seqs].sum())))
    free, on_cpu = free_bytes(target.device), target.device.type == "cpu"
    return Place(
        device="cpu" if on_cpu else torch.cuda.get_device_name(),
        dtype=target.dtype_name,
        quantization=target.linear.name,
        kv_cache_dtype=kv_dtype_of(config, target),
        weight_bytes=weight_footprint(model, target).held,
        free_bytes=free,
        kv_budget=config.kv_cache_memory or int(free * (CPU_SHARE if on_cpu else CUDA_SHARE)),
        limits=limits,
        reason=pool.reason,
        paged=config.paged,
        shares_prompts=_shares(config),
    )


def on_gpu(gpu: Gpu, config: EngineConfig, model: ModelHandle) -> Place:
    """A GPU that need not be there, in bf16. Raises `CapacityError` where the model does not fit, `ConfigError` for what cannot be."""
    from batchinfer.build_model import CUDA_DEFAULTS
    from batchinfer.core.admission import EngineLimits

    if config.dtype == "float32":
        raise ConfigError(f"--gpu with --dtype float32: {gpu.title} is planned for in bf16; leave --dtype out")
    kv_dtype = "bf16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    weights = Footprint.of(model.config, config.quantization, 2, 2, model.config.tied_head and config.quantization == "none").held
    usable = int(gpu.memory * MEMORY_SHARE)
    per_token = kv_bytes(model, kv_dtype)
    block_size = config.block_size or CUDA_DEFAULTS["block_size"]
    budget = config.kv_cache_memory or usable - weights
    blocks = config.num_kv_blocks or budget // (block_size * per_token)
    if blocks < 2 or weights + blocks * block_size * per_token > usable:
        raise CapacityError(
            f"{gpu.title}: the weights take {weights / 1e9:.1f} GB of {usable / 1e9:.1f} GB that can be used, "
            f"and a KV pool of {max(blocks, 2):,} blocks {max(blocks, 2) * block_size * per_token / 1e9:.1f} GB"
        )
    asked = "asked for" if config.num_kv_blocks or config.kv_cache_memory else f"what the weights leave of {MEMORY_SHARE:.0%} of the memory"
    limits = EngineLimits(
        max_model_len=model.max_model_len,
        pool_tokens=blocks * block_size,
        max_num_seqs=config.max_num_seqs or CUDA_DEFAULTS["max_num_seqs"],
        max_num_batched_tokens=config.max_num_batched_tokens or CUDA_DEFAULTS["max_num_batched_tokens"],
        block_size=block_size,
        num_blocks=blocks + 1,
        kv_bytes_per_token=per_token,
    )
    return Place(gpu.title, "bf16", config.quantization, kv_dtype, weights, usable, budget, limits, asked, config.paged, _shares(config))


def _shares(config: EngineConfig) -> bool:
    return config.kv_cache and config.paged and config.prefix_caching


def kv_bytes(model: ModelHandle, kv_dtype: str) -> int:
    """Bytes of a token's keys and values, all layers, scales included."""
    from batchinfer.attention.base import AttnSpec
    from batchinfer.attention.kv_cache import KV_FORMATS

    sizes = model.config
    spec = AttnSpec(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, sizes.attn_scale)
    return KV_FORMATS[kv_dtype].bytes_per_token(spec, sizes.num_layers)


def kv_fits(place: Place, model: ModelHandle, lengths: RowLengths, fixed_blocks: int | None) -> list[KVFit]:
    """The job in the place's own KV format and in the usual others; `fixed_blocks`: a pool that was asked for in blocks."""
    limits, size = place.limits, place.limits.block_size
    if place.paged:
        needed = lengths.blocks(size, limits.max_num_seqs, place.shares_prompts)
    else:
        needed = min(lengths.num_answers, limits.max_num_seqs) * -(-limits.max_model_len // size)
    fits = []
    for dtype in _formats(place.kv_cache_dtype):
        per_token = kv_bytes(model, dtype)
        room = fixed_blocks or place.kv_budget // (size * per_token)
        fits.append(KVFit(dtype, per_token, needed, needed * size * per_token, int(room), place.rows_at_once(lengths, int(room) * size)))
    return fits


def _formats(own: str) -> Iterable[str]:
    return dict.fromkeys((own, "bf16", "int8"))
