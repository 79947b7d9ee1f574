"""The model's half of the composition root: a name to its files, formats, sizes and weights on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchinfer.config import EngineConfig
from batchinfer.errors import CapacityError, ConfigError
from batchinfer.io.tokenizer import Tokenizer, load_tokenizer
from batchinfer.model.config import ModelConfig, read_model_config
from batchinfer.model.generation import GenerationConfig, read_generation_config
from batchinfer.runtime.threads import wait_politely
from batchinfer.stopwatch import NO_STOPWATCH, Stopwatch
from batchinfer.weights.gguf import read_gguf
from batchinfer.weights.source import ModelFiles, resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from batchinfer.attention.base import AttnSpec
    from batchinfer.core.sequences import SequenceTable
    from batchinfer.core.step_cost import StepCost
    from batchinfer.core.vocabulary import Vocabulary
    from batchinfer.layers.lm_head import LmHead
    from batchinfer.model.assemble import Piece, Placement
    from batchinfer.model.decoder import Decoder
    from batchinfer.model.footprint import Footprint
    from batchinfer.runtime.calibration import Subject
    from batchinfer.runtime.data_plane import DataPlane
    from batchinfer.runtime.device import ComputeTarget
    from batchinfer.runtime.head import Shaping

CPU_DEFAULTS = {"max_num_seqs": 256, "max_num_batched_tokens": 1024, "block_size": 32}
LEAST_KEPT_BYTES = 8 << 20  # of packed weights that are kept on the disk: fewer are packed in 100 ms
CUDA_DEFAULTS = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192, "block_size": 32}


@dataclass(frozen=True, slots=True)
class ModelHandle:
    """A model before its weights: enough to check, render and count every row."""

    files: ModelFiles
    config: ModelConfig
    generation: GenerationConfig
    tokenizer: Tokenizer
    max_model_len: int


def open_model(config: EngineConfig, watch: Stopwatch = NO_STOPWATCH) -> ModelHandle:
    """Resolve the name, read configuration and tokenizer; no weights, and no torch."""
    wait_politely()
    with watch.stage("find the model"):
        files = resolve_model(config.model, config.revision)
    with watch.stage("read its configuration"):
        header = read_gguf(files.path) if files.kind == "gguf" else None  # once: a vocabulary takes a tenth of a second to read
        model, generation = read_model_config(files, header), read_generation_config(files, header)
    length = config.max_model_len or model.max_position
    if length > model.max_position:
        raise ConfigError(f"--max-model-len {length:,}: the context of {config.model} is {model.max_position:,} tokens")
    with watch.stage("tokenizer"):
        tokenizer = load_tokenizer(files, header)
    return ModelHandle(files, model, generation, tokenizer, length)


def linear_shapes(model: ModelConfig) -> list[tuple[int, int]]:
    """(out, in) of every kind of linear layer, fused or sliced as they run."""
    from batchinfer.layers.lm_head import slice_widths
    from batchinfer.model.footprint import layer_shapes

    return [*layer_shapes(model), *((width, model.hidden_size) for width in sorted(set(slice_widths(model.vocab_size))))]


def step_cost(config: EngineConfig, model: ModelHandle, again: bool = False) -> StepCost:
    """What a step of this model costs on this machine: measured in a second or two at the first few calls, then remembered."""
    from batchinfer.runtime import calibration

    return calibration.step_cost(_subject(config, model), again)


def try_step_cost(config: EngineConfig, model: ModelHandle, watch: Stopwatch = NO_STOPWATCH) -> StepCost | None:
    """What a step costs here, as it was measured earlier; None if it never was."""
    from batchinfer.runtime import calibration

    return calibration.try_step_cost(_subject(config, model, watch))


def _subject(config: EngineConfig, model: ModelHandle, watch: Stopwatch = NO_STOPWATCH) -> Subject:
    import torch

    from batchinfer.runtime.calibration import Subject

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    target = compute_target(config, model, watch)
    return Subject(model.config, target, attn_spec(model.config), kv_dtype_of(config, target), batch_sizes(config, target)["block_size"])


def compute_target(config: EngineConfig, model: ModelHandle, watch: Stopwatch = NO_STOPWATCH) -> ComputeTarget:
    """Device and number format of this model under these settings."""
    from batchinfer.runtime.device import Wanted, choose_target

    wanted = Wanted(config.device, config.dtype, config.quantization, config.flash_attention, config.graphs)
    with watch.stage("device and kernels"):
        return choose_target(wanted, model.config.dtype, is_quantised(model), watch)


def is_quantised(model: ModelHandle) -> bool:
    """True where the checkpoint's weights are of fewer bits than any dtype, and widened at load."""
    return model.files.kind == "gguf" and model.config.dtype == "float32"


def weight_footprint(model: ModelHandle, target: ComputeTarget, quantization: str | None = None) -> Footprint:
    """Bytes of the model's weights as the target holds them, or as they would be with another quantization."""
    from batchinfer.layers.linear import WITHOUT_COPY
    from batchinfer.model.footprint import Footprint

    name = quantization or target.linear.name
    original = 2 if name == "none" and target.dtype.itemsize == 2 and not is_quantised(model) else 4  # quantised from float32
    shares_table = model.config.tied_head and name == "none" and target.linear.pack in WITHOUT_COPY
    return Footprint.of(model.config, name, target.dtype.itemsize, original, shares_table)


def find_sizes(model: ModelHandle, target: ComputeTarget, watch: Stopwatch) -> None:
    """Find out, before any weight takes memory, what packs want to know of every shape of linear layer."""
    with watch.stage("row sizes"):
        found = [target.linear.sizes(shape) for shape in linear_shapes(model.config)]
    watch.say("row sizes", "measured" if any(known.measured for known in found) else "remembered")


def load_weights(model: ModelHandle, target: ComputeTarget, watch: Stopwatch = NO_STOPWATCH) -> tuple[Decoder, LmHead]:
    """Read and pack every weight. Raises `CapacityError` where memory is too short for them."""
    from batchinfer.model.assemble import Placement
    from batchinfer.runtime.pool_size import return_freed_memory

    place = Placement(target.dtype, target.device, target.linear, target.ops)
    find_sizes(model, target, watch)
    parts = _load_packed(model, target, place, watch) or _pack(model, target, place, watch)
    return_freed_memory()
    return parts


def _is_kept(model: ModelHandle, target: ComputeTarget) -> bool:
    """True where the weights, once prepared, are worth keeping on the disk.

    A checkpoint in the run's own dtype would be on the disk twice (model/kept.py says for what), and a small model is
    packed in less than 100 ms.
    """
    from batchinfer.weights.packed_shelf import packed_limit

    changes = target.linear.name != "none" or is_quantised(model)
    is_large = weight_footprint(model, target).held >= LEAST_KEPT_BYTES
    return target.device.type == "cpu" and changes and is_large and packed_limit() > 0


def _kept_at(model: ModelHandle, target: ComputeTarget, place: Placement) -> Path:
    from batchinfer.model.kept import place_of

    products = [choice.chosen for choice in target.choices if choice.operation == "matmul"]
    return place_of(model.files, model.config, place, [target.native.target, *products])


def _load_packed(model: ModelHandle, target: ComputeTarget, place: Placement, watch: Stopwatch) -> tuple[Decoder, LmHead] | None:
    """The weights as an earlier start prepared them; None where there are none, or damaged ones, or no memory for them."""
    from batchinfer.model.assemble import join
    from batchinfer.model.kept import mapped_bytes, read_pieces
    from batchinfer.runtime.pool_size import free_bytes
    from batchinfer.weights.packed_file import DamagedFile
    from batchinfer.weights.packed_shelf import discard, try_open

    if not _is_kept(model, target) or weight_footprint(model, target).peak > free_bytes(target.device):
        return None
    with watch.stage("read the packed weights"):
        file = try_open(_kept_at(model, target, place))
        if file is None:
            return None
        try:
            pieces = watch.each("read the packed weights", read_pieces(file))
            with watch.stage("lay the weights out"):
                parts = join(model.config, pieces, place, model.max_model_len)
        except DamagedFile as err:
            discard(file.path, err)
            return None
    parts[0].mapped_bytes = mapped_bytes(file)
    watch.say("read the packed weights", f"{file.num_bytes / 1e6:,.0f} MB of an earlier start")
    return parts


def _pack(model: ModelHandle, target: ComputeTarget, place: Placement, watch: Stopwatch) -> tuple[Decoder, LmHead]:
    """The weights, read from the checkpoint and packed; what is worth it is kept for the next start."""
    from batchinfer.model.assemble import join, prepare
    from batchinfer.model.kept import Keeper, writing
    from batchinfer.model.load import iter_weights
    from batchinfer.runtime.pool_size import free_bytes

    with watch.stage("read the weights"):
        weights = iter_weights(model.files, model.config)
    free, size = free_bytes(target.device), weight_footprint(model, target)
    if size.peak > free:
        raise CapacityError(_too_large(model, target, free))
    with watch.stage("pack the weights"):
        pieces: Iterable[Piece] = prepare(watch.each("read the weights", weights), place)
        if _is_kept(model, target):
            facts = {"model": model.files.name, "form": f"{target.linear.name}, {target.dtype_name}"}
            pieces = writing(pieces, Keeper(_kept_at(model, target, place), facts, model.config, size.held, watch))
        return join(model.config, pieces, place, model.max_model_len)


def _too_large(model: ModelHandle, target: ComputeTarget, free: int) -> str:
    size, gib = weight_footprint(model, target), 2**30
    held_as = target.dtype_name if target.linear.name == "none" else target.linear.name
    text = (
        f"the weights of {model.files.name} take {size.held / gib:.1f} GiB as {held_as}, {size.peak / gib:.1f} GiB while they are loaded; "
        f"{free / gib:.1f} GiB of memory are free"
    )
    if target.device.type != "cpu":
        return text
    others = {name: weight_footprint(model, target, name) for name in ("int8", "int4")}
    return text + "".join(
        f"; with --quantization {name} {other.peak / gib:.1f} GiB are enough" for name, other in others.items() if other.peak <= free
    )


def batch_sizes(config: EngineConfig, target: ComputeTarget) -> dict[str, int]:
    """Rows, tokens a step and block size: as they were given, else this device's defaults."""
    defaults = CUDA_DEFAULTS if target.device.type == "cuda" else CPU_DEFAULTS
    return {name: getattr(config, name) or default for name, default in defaults.items()}


def attn_spec(model: ModelConfig) -> AttnSpec:
    """The shape of the model's attention layers."""
    from batchinfer.attention.base import AttnSpec

    return AttnSpec(model.num_heads, model.num_kv_heads, model.head_dim, model.attn_scale)


def kv_dtype_of(config: EngineConfig, target: ComputeTarget) -> str:
    """The format of keys and values: `auto` is always the run's dtype, so that 8 bits are asked for by name."""
    return target.dtype_name if config.kv_cache_dtype == "auto" else config.kv_cache_dtype


def kv_bytes_per_token(kv_dtype: str, model: ModelConfig) -> int:
    """Bytes that a token's keys and values take in all layers."""
    from batchinfer.attention.kv_cache import KV_FORMATS

    return KV_FORMATS[kv_dtype].bytes_per_token(attn_spec(model), model.num_layers)


@dataclass(frozen=True, slots=True)
class Ground:
    """What a data plane stands on: the rows, what is done with their logits, and the blocks that hold their keys and values."""

    table: SequenceTable
    vocabulary: Vocabulary
    shaping: Shaping
    num_blocks: int
    block_size: int


def data_plane(config: EngineConfig, model: ModelHandle, target: ComputeTarget, parts: tuple[Decoder, LmHead], ground: Ground) -> DataPlane:
    """Put together the parts that compute, over loaded weights."""
    from batchinfer.attention.kv_cache import KV_FORMATS, KVCache
    from batchinfer.runtime.batch import RaggedBatchBuilder
    from batchinfer.runtime.data_plane import DataPlane
    from batchinfer.runtime.device import choose_attention
    from batchinfer.runtime.head import GenerateHead
    from batchinfer.runtime.runner import EagerRunner
    from batchinfer.runtime.sampler import choose_sampler

    decoder, lm_head = parts
    layers, kv_format = model.config.num_layers, KV_FORMATS[kv_dtype_of(config, target)]
    kv = KVCache(attn_spec(model.config), layers, ground.num_blocks, ground.block_size, kv_format, target.device)
    attention, choice = choose_attention(kv, target)
    sampler, sampling = choose_sampler(target, ground.vocabulary.size)
    return DataPlane(
        batcher=RaggedBatchBuilder(ground.table, ground.block_size, target.device, ground.shaping.scores),
        runner=EagerRunner(decoder, attention),
        head=GenerateHead(lm_head, ground.table, ground.vocabulary.size, ground.shaping, sampler),
        clear=kv.clear,
        copy=kv.copy,
        choices=(choice, sampling),
    )
