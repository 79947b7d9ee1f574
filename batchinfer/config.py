"""Settings as the user gave them: frozen, validated, nothing derived. `None` means "choose for me" (build.py does)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchinfer.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "bf16", "float32")
KV_DTYPES = ("auto", "bf16", "float32", "int8")
QUANTIZATIONS = ("none", "int8", "int4")
BLOCK_SIZES = (16, 32, 64, 128, 256)  # kernels lay 16 keys side by side
ORDERS = ("auto", "arrival")
MAX_SPECULATIVE_TOKENS = 64
LATER = {  # accepted words that a later version will run: refused by name
    "kv_cache_dtype": ("fp8",),
    "quantization": ("fp8",),
    "order": ("global",),
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that decides how the engine is put together.

    A feature that is switched off is really absent, and changes no token but through the arithmetic of other kernels.
    """

    model: str = "smollm2-135m"
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "none"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None  # bytes
    kv_cache_dtype: str = "auto"
    kv_cache: bool = True  # False: every step computes the whole sequence again
    paged: bool = True  # False: room for max_model_len tokens in one piece per request
    prefix_caching: bool = True
    continuous_batching: bool = True  # False: a batch is filled, and ends whole before the next one begins
    chunked_prefill: bool = True
    flash_attention: bool = True  # False: the reference attention
    graphs: bool = True  # CUDA graphs; on a CPU fused native operations and sampling
    speculative: str = "off"  # "ngram", or "draft:MODEL" with a model of the same tokenizer
    num_speculative_tokens: int | None = None  # None: as many as pay, step by step
    order: str = "auto"
    seed: int = 0
    threads: int | None = None
    fake_model: bool = False  # everything real but the forward pass

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that no machine could run."""
        _one_of("device", self.device, DEVICES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_DTYPES)
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("order", self.order, ORDERS)
        kind, colon, model = self.speculative.partition(":")
        if self.speculative not in ("off", "ngram") and not (kind == "draft" and colon and model):
            raise ConfigError(f"--speculative {self.speculative}: must be off, ngram, or draft:MODEL with the name of a small model")
        _between("max_model_len", self.max_model_len, 1, 2**24)
        _between("max_num_seqs", self.max_num_seqs, 1, 65_536)
        _between("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**20)
        _between("num_kv_blocks", self.num_kv_blocks, 2, 2**31 - 1)
        _between("kv_cache_memory", self.kv_cache_memory, 1, 2**50)
        _between("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)
        _between("threads", self.threads, 1, 4096)
        _between("seed", self.seed, -(2**63), 2**64 - 1)
        if self.block_size is not None and self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"--block-size {self.block_size}: must be one of {', '.join(map(str, BLOCK_SIZES))}")
        if self.num_kv_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigError("--num-kv-blocks and --kv-cache-memory both size the KV pool; give one of them")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    flag = "--" + name.replace("_", "-")
    if value in LATER.get(name, ()):
        raise ConfigError(f"{flag} {value} is not supported by this version; use one of {', '.join(allowed)}")
    if value not in allowed:
        raise ConfigError(f"{flag} {value}: must be one of {', '.join(allowed)}")


def _between(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(f"--{name.replace('_', '-')} {value}: must be from {low:,} to {high:,}")


def cache_root() -> Path:
    """The folder that holds what this tool fetches and measures: `BATCHINFER_CACHE`, else the user's cache folder."""
    import os

    given = os.environ.get("BATCHINFER_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "batchinfer"
    try:
        return Path.home() / ".cache" / "batchinfer"
    except RuntimeError:  # no HOME and no passwd entry
        import tempfile

        return Path(tempfile.gettempdir()) / "batchinfer-cache"
