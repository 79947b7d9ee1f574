"""The composition root: settings to engine. The only file, with its two halves beside it, that names concrete parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from batchinfer.build_model import CPU_DEFAULTS, CUDA_DEFAULTS, Ground, data_plane, is_quantised, kv_bytes_per_token, load_weights
from batchinfer.build_model import ModelHandle as ModelHandle
from batchinfer.build_model import batch_sizes as batch_sizes
from batchinfer.build_model import compute_target as compute_target
from batchinfer.build_model import kv_dtype_of as kv_dtype_of
from batchinfer.build_model import linear_shapes as linear_shapes
from batchinfer.build_model import open_model as open_model
from batchinfer.build_model import step_cost as step_cost
from batchinfer.build_model import try_step_cost as try_step_cost
from batchinfer.build_model import weight_footprint as weight_footprint
from batchinfer.config import EngineConfig
from batchinfer.errors import CapacityError
from batchinfer.runtime.threads import wait_politely
from batchinfer.stopwatch import NO_STOPWATCH, Stopwatch

if TYPE_CHECKING:
    from batchinfer.core.admission import EngineLimits
    from batchinfer.engine import Engine, EngineFacts
    from batchinfer.layers.lm_head import LmHead
    from batchinfer.model.decoder import Decoder
    from batchinfer.ops.table import Choice
    from batchinfer.runtime.data_plane import DataPlane
    from batchinfer.runtime.device import ComputeTarget

KERNELS_THAT_ROUND = ("matmul", "attention", "rms_norm", "silu_and_mul", "sampling")  # another implementation may change a last bit


@dataclass(frozen=True, slots=True)
class JobNeed:
    """What a job is known to need: KV tokens that it can use at once."""

    pool_tokens: int

    @classmethod
    def of(cls, config: EngineConfig, model: ModelHandle, lengths: Iterable[int]) -> JobNeed:
        """The widest of the rows seen so far, as many as run at once. `lengths`: prompt plus `max_tokens` of each row."""
        seqs = config.max_num_seqs or max(CPU_DEFAULTS["max_num_seqs"], CUDA_DEFAULTS["max_num_seqs"])
        return cls(sum(sorted((min(length, model.max_model_len) for length in lengths), reverse=True)[:seqs]))


class WeightShelf:
    """Loaded weights, kept for several engines that compute alike and differ in how they batch, remember or guess.

    The engines may exist side by side but must not run at the same time. When memory is short the others are dropped.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], tuple[Decoder, LmHead]] = {}

    def load(self, model: ModelHandle, target: ComputeTarget, watch: Stopwatch = NO_STOPWATCH) -> tuple[Decoder, LmHead]:
        """The model's weights as the target computes with them, loaded at the first time."""
        from batchinfer.runtime.pool_size import free_bytes, return_freed_memory

        chosen = (f"{choice.operation} {choice.chosen}" for choice in target.choices)
        key = (str(model.files.path), target.dtype_name, target.linear.name, *chosen)
        if key not in self._kept:
            mapped = sum(decoder.mapped_bytes for decoder, _ in self._kept.values())
            if self._kept and weight_footprint(model, target).peak > free_bytes(target.device, mapped):
                self._kept.clear()
                return_freed_memory()
            self._kept[key] = load_weights(replace(model, max_model_len=model.config.max_position), target, watch)
        return self._kept[key]


def build_engine(
    config: EngineConfig,
    model: ModelHandle,
    need: JobNeed | None = None,
    shelf: WeightShelf | None = None,
    watch: Stopwatch = NO_STOPWATCH,
) -> Engine:
    """Load the weights, or take them from the shelf, and put the engine together, one part after another."""
    wait_politely()
    import torch

    from batchinfer.build_control import control_plane, row_parts, settled
    from batchinfer.build_drafts import choose_speculation, open_draft
    from batchinfer.build_editors import choose_editors
    from batchinfer.build_structures import StructureParts
    from batchinfer.engine import Engine
    from batchinfer.runtime.data_plane import both
    from batchinfer.runtime.head import Shaping

    config = settled(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    target = compute_target(config, model, watch)
    vocabulary = model.tokenizer.vocabulary
    try:
        draft = open_draft(config, model)
        load = load_weights if shelf is None else shelf.load
        parts = None if config.fake_model else load(model, target, watch)
        with watch.stage("KV pool"):
            mapped = 0 if parts is None else parts[0].mapped_bytes
            limits, pool = engine_limits(config, model, target, need, draft, mapped)
        structures = StructureParts(model)
        rows = row_parts(vocabulary, limits, structures.follow)
        editors = choose_editors(model, rows, structures.constraints)
        ground = Ground(rows.table, vocabulary, Shaping(editors, rows.scores), limits.num_blocks, limits.block_size)
        control = control_plane(config, limits, rows, choose_speculation(config, model, draft, limits, ground), editors)
        with watch.stage("KV pool"):
            data = _fake_plane(ground, target) if parts is None else data_plane(config, model, target, parts, ground)
        control, data = structures.added(control, data, limits)
    except MemoryError as err:
        raise CapacityError(f"out of memory while loading {config.model}: free memory, or take a smaller model or pool") from err
    data = replace(data, clear=both(data.clear, control.clear), copy=both(data.copy, control.copy), choices=(*data.choices, pool))
    return Engine(control, data, limits, vocabulary, _facts(config, model, target, (data, limits), watch))


def engine_limits(
    config: EngineConfig,
    model: ModelHandle,
    target: ComputeTarget,
    need: JobNeed | None,
    draft: ModelHandle | None = None,
    mapped: int = 0,
) -> tuple[EngineLimits, Choice]:
    """What the engine would hold on this machine now, and why the pool is as large as it is; nothing is loaded.

    A draft model's keys and values lie in the same blocks, so that each is larger by them. `mapped`: bytes of weights in
    mapped files, which the system counts as free.
    """
    from batchinfer.build_control import whole_slabs
    from batchinfer.core.admission import EngineLimits
    from batchinfer.runtime.pool_size import PoolRequest, choose_num_blocks

    sizes, kv_name = batch_sizes(config, target), kv_dtype_of(config, target)
    per_token = sum(kv_bytes_per_token(kv_name, handle.config) for handle in (model, draft) if handle is not None)
    ask = PoolRequest(
        block_size=sizes["block_size"],
        bytes_per_token=per_token,
        max_model_len=model.max_model_len,
        max_num_seqs=sizes["max_num_seqs"],
        num_blocks=config.num_kv_blocks,
        memory=config.kv_cache_memory,
        need_tokens=need.pool_tokens if need is not None and config.paged else None,
        is_stored=not config.fake_model,
        mapped=mapped,
    )
    num_blocks, reason = choose_num_blocks(ask, target.device)
    if not config.paged:
        num_blocks = whole_slabs(num_blocks, ask.max_num_seqs, ask.max_model_len, ask.block_size)
    limits = EngineLimits(
        max_model_len=model.max_model_len,
        pool_tokens=(num_blocks - 1) * sizes["block_size"],
        max_num_seqs=sizes["max_num_seqs"],
        max_num_batched_tokens=sizes["max_num_batched_tokens"],
        block_size=sizes["block_size"],
        num_blocks=num_blocks,
        kv_bytes_per_token=per_token,
    )
    return limits, _pool_choice(limits, kv_name, reason)


def _fake_plane(ground: Ground, target: ComputeTarget) -> DataPlane:
    from batchinfer.runtime.batch import RaggedBatchBuilder
    from batchinfer.runtime.data_plane import DataPlane
    from batchinfer.runtime.fake import FakeHead, FakeRunner

    batcher = RaggedBatchBuilder(ground.table, ground.block_size, target.device)
    return DataPlane(batcher, FakeRunner(), FakeHead(ground.table, ground.vocabulary, ground.shaping.editors))


def _facts(
    config: EngineConfig, model: ModelHandle, target: ComputeTarget, built: tuple[DataPlane, EngineLimits], watch: Stopwatch
) -> EngineFacts:
    """Say what was chosen and why, and what the settings came out as."""
    import torch

    from batchinfer.build_control import features_off
    from batchinfer.build_drafts import speculation_choices
    from batchinfer.engine import EngineFacts

    data, limits = built
    differ = [] if config.fake_model else _self_test(model, target, watch)
    with watch.stage("what 8 bits would gain"):
        hint = _quantization_hint(config, model, target)
    on_cpu = target.device.type == "cpu"
    same = "yes" if on_cpu else "not promised on a GPU"
    if differ:
        same = "no, linear layers of shape " + ", ".join(f"{o}x{i}" for o, i in differ) + " differ on this processor"
    made = (*target.choices, *hint, _kv_choice(config, target), *data.choices, *speculation_choices(config))
    choices = [
        *map(str, made),
        *features_off(config, limits),
        f"batch: up to {limits.max_num_seqs:,} rows, {limits.max_num_batched_tokens:,} tokens a step; context {limits.max_model_len:,} tokens",
        f"threads: {torch.get_num_threads()}",
        f"same bytes at any batch: {same}",
    ]
    settings: dict[str, object] = {
        "model": config.model,
        "device": target.device.type,
        "dtype": target.dtype_name,
        "quantization": config.quantization,
        "kv_cache_dtype": kv_dtype_of(config, target),
        **{choice.operation: choice.chosen for choice in made if choice.operation in KERNELS_THAT_ROUND},
        "native": target.native.target,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "block_size": limits.block_size,
        "num_kv_blocks": limits.num_blocks - 1,
        "kv_cache": config.kv_cache,
        "paged": config.paged,
        "prefix_caching": config.prefix_caching,
        "continuous_batching": config.continuous_batching,
        "chunked_prefill": config.chunked_prefill,
        "flash_attention": config.flash_attention,
        "graphs": config.graphs,
        "speculative": config.speculative,
        "num_speculative_tokens": config.num_speculative_tokens,
        "order": config.order,
        "seed": config.seed,
        "threads": torch.get_num_threads(),
        "fake_model": config.fake_model,
        "batch_invariant": on_cpu and not differ,
    }
    return EngineFacts(choices, settings)


def _self_test(model: ModelHandle, target: ComputeTarget, watch: Stopwatch) -> list[tuple[int, int]]:
    """The shapes of linear layers whose rows see their neighbours here."""
    from batchinfer.runtime.self_test import linear_self_test

    with watch.stage("self-test"):
        known = linear_self_test(target, linear_shapes(model.config))
    watch.say("self-test", "measured" if known.measured else "remembered")
    differ: list[tuple[int, int]] = known.value
    return differ


def _quantization_hint(config: EngineConfig, model: ModelHandle, target: ComputeTarget) -> list[Choice]:
    """One line on what 8 bits would gain here, as measured; none where they would not."""
    from batchinfer.model.footprint import layer_shapes
    from batchinfer.ops.table import Choice
    from batchinfer.runtime.gain import int8_speed_up

    times = None if config.fake_model else int8_speed_up(target, layer_shapes(model.config))
    if times is None:
        return []
    own = "the model's own precision; " if target.dtype_name == model.config.dtype and not is_quantised(model) else ""
    share = "half" if target.dtype.itemsize == 2 else "a quarter of"
    hint = f"--quantization int8 multiplies {times:.1f}x as fast here with {share} the bytes of weights"
    if config.kv_cache_dtype == "int8":
        return [Choice("quantization", "none", f"{own}{hint}; it changes some answers")]
    cache = f"--kv-cache-dtype int8 keeps keys and values in some {share} the bytes"
    return [Choice("quantization", "none", f"{own}{hint}, {cache}; either changes some answers")]


def _kv_choice(config: EngineConfig, target: ComputeTarget) -> Choice:
    from batchinfer.ops.table import Choice

    reasons = {"auto": "the run's dtype", "int8": "asked for; a scale for every head of every token"}
    return Choice("KV dtype", kv_dtype_of(config, target), reasons.get(config.kv_cache_dtype, "asked for"))


def _pool_choice(limits: EngineLimits, kv_name: str, reason: str) -> Choice:
    from batchinfer.ops.table import Choice

    gib = limits.num_blocks * limits.block_size * limits.kv_bytes_per_token / 2**30
    return Choice("KV pool", f"{limits.num_blocks - 1:,} blocks of {limits.block_size} tokens, {gib:.2f} GiB as {kv_name}", reason)
