"""How many KV blocks: as asked, or what the job needs within what memory allows."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from batchinfer.errors import CapacityError, ConfigError
from batchinfer.machine import read_memory

CPU_SHARE = 0.4  # of the memory that is free once the weights are loaded
CUDA_SHARE = 0.85
UNBOUNDED = 2**50
SPARE = 1.25  # room above the need, for prefixes that outlive their rows


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """What bears on the size of the pool. `need_tokens`: KV tokens that the job can use at once, None if unknown."""

    block_size: int
    bytes_per_token: int
    max_model_len: int
    max_num_seqs: int
    num_blocks: int | None
    memory: int | None  # bytes
    need_tokens: int | None
    mapped: int = 0  # bytes of weights in mapped files
    is_stored: bool = True  # False: the forward pass is a fake, and blocks are numbers only


def free_bytes(device: torch.device, mapped: int = 0) -> int:
    """Memory that the pool could take on the device, cgroup and address-space limits respected.

    `mapped`: bytes that are in use in mapped files, which the system could drop and would read again at every step.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    free = max(0, read_memory().free - mapped)
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        free = min(free, max(0, limit - used))
    return free


def return_freed_memory() -> None:
    """Hand what loading freed back to the system, where the C library can: it keeps up to several times a small model's weights."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)


def choose_num_blocks(ask: PoolRequest, device: torch.device) -> tuple[int, str]:
    """(blocks in all, the null block included; why). Raises `ConfigError` or `CapacityError` when it cannot be."""
    block_bytes = ask.block_size * ask.bytes_per_token
    free = free_bytes(device, ask.mapped) if ask.is_stored else UNBOUNDED
    if ask.num_blocks is not None or ask.memory is not None:
        blocks = ask.num_blocks if ask.num_blocks is not None else (ask.memory or 0) // block_bytes
        flag = "--num-kv-blocks" if ask.num_blocks is not None else "--kv-cache-memory"
        if blocks < 2:
            raise ConfigError(f"{flag}: the pool needs at least 2 blocks of {_mib(block_bytes)}")
        if (blocks + 1) * block_bytes > free:
            raise ConfigError(
                f"{flag}: a pool of {blocks:,} blocks takes {_mib(blocks * block_bytes)}; {_mib(free)} of memory are free, "
                f"so at most {max(0, free // block_bytes - 1):,} blocks"
            )
        return blocks + 1, f"asked for by {flag}"
    share = CUDA_SHARE if device.type == "cuda" else CPU_SHARE
    most = int(free * share) // block_bytes
    if most < 2:
        raise CapacityError(
            f"{_mib(free)} of memory are free, too little for a KV pool ({_mib(2 * block_bytes)} at least); free memory or take a smaller model"
        )
    rows = max(ask.max_num_seqs, 1)
    if device.type == "cuda":
        return most, f"{share:.0%} of the free memory"
    need = ask.need_tokens if ask.need_tokens is not None else rows * ask.max_model_len
    # Every row's last block is partly empty; and one row of full length must fit, whatever was read so far.
    wanted = max(int(need * SPARE) + rows * ask.block_size, ask.max_model_len + ask.block_size)
    blocks = -(-wanted // ask.block_size) + 1
    if blocks <= most:
        return blocks, "what the job can use at once"
    return most, f"{share:.0%} of the free memory; the job could use {_mib(wanted * ask.bytes_per_token)}"


def _mib(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"
