"""The control plane's half of the composition root: settings to the parts that decide. A feature's off is its do-nothing twin.

Features that exclude each other are settled first (`settled`), so that every combination of switches can be built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from batchinfer.config import EngineConfig
from batchinfer.core.admission import EngineLimits
from batchinfer.core.batching import ContinuousBatching, StaticBatches
from batchinfer.core.block_pool import BlockPool, KVPool
from batchinfer.core.contiguous import ContiguousPool
from batchinfer.core.drafts import NO_SPECULATION, Speculation
from batchinfer.core.forks import NoForks, SiblingForks
from batchinfer.core.logprobs import RowScores
from batchinfer.core.memory import KVMemory, Lifecycle
from batchinfer.core.order import ArrivalQueue, GroupedQueue
from batchinfer.core.prefix_cache import NoPrefixCache, PrefixCache, TriePrefixCache
from batchinfer.core.retention import KeepKV, RecomputeAll, RecomputeInPlace, Retention
from batchinfer.core.room import ForecastRoom, FreeSlabs, NothingHeld
from batchinfer.core.scheduler import Budget, ChunkedPrefill, Policies, Scheduler, WholePrompts
from batchinfer.core.sequences import SequenceTable
from batchinfer.core.stop import StopChecker
from batchinfer.core.structure import NeverEnds, RowEndings
from batchinfer.core.turns import TakeTurns
from batchinfer.core.vocabulary import Vocabulary
from batchinfer.engine import ControlPlane
from batchinfer.errors import CapacityError


def settled(config: EngineConfig) -> EngineConfig:
    """The settings, without the features that need one which is off.

    Blocks can be shared only where memory is in blocks that outlive a step; a prompt can be cut only where its first
    part is kept.
    """
    shares = config.prefix_caching and config.paged and config.kv_cache
    return replace(config, prefix_caching=shares, chunked_prefill=config.chunked_prefill and config.kv_cache)


def features_off(config: EngineConfig, limits: EngineLimits) -> list[str]:
    """A line for each feature that is switched off and of which nothing else speaks."""
    lines = []
    if not config.kv_cache:
        lines.append("KV cache: off (every step computes whole sequences, so without prefix cache and chunked prefill)")
    if not config.paged:
        slabs = (limits.num_blocks - 1) // slab_blocks(limits.max_model_len, limits.block_size)
        lines.append(f"paged KV: off (room for {slabs:,} rows of {limits.max_model_len:,} tokens each, so without prefix cache)")
    if not config.continuous_batching:
        lines.append("continuous batching: off (a batch ends whole before the next one begins)")
    return lines


def slab_blocks(max_model_len: int, block_size: int) -> int:
    """Blocks that hold the longest sequence."""
    return -(-max_model_len // block_size)


def whole_slabs(num_blocks: int, max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Blocks, the null block included, of the slabs that `num_blocks` hold, at most one for each row that runs at once.

    Raises `CapacityError` where not even one fits.
    """
    slab = slab_blocks(max_model_len, block_size)
    slabs = min((num_blocks - 1) // slab, max_num_seqs)
    if not slabs:
        raise CapacityError(
            f"--no-paged takes room for --max-model-len {max_model_len:,} tokens per row; the KV pool holds "
            f"{(num_blocks - 1) * block_size:,}: lower --max-model-len, or raise --num-kv-blocks or --kv-cache-memory"
        )
    return 1 + slabs * slab


@dataclass(frozen=True, slots=True)
class RowParts:
    """The running rows and what ends them: made first, since every other part looks at them."""

    table: SequenceTable
    stopper: StopChecker
    scores: RowScores


def never_ends(table: SequenceTable) -> RowEndings:
    """Rows without structures."""
    return NeverEnds()


def row_parts(vocabulary: Vocabulary, limits: EngineLimits, follow: Callable[[SequenceTable], RowEndings] = never_ends) -> RowParts:
    """Columns for as many and as long rows as the engine holds; `follow` makes what knows of their structures."""
    longest = min(limits.max_model_len, limits.pool_tokens + 1)
    table = SequenceTable(limits.max_num_seqs, longest, -(-longest // limits.block_size))
    return RowParts(table, StopChecker(table, vocabulary, follow(table)), RowScores(table))


def control_plane(
    config: EngineConfig,
    limits: EngineLimits,
    rows: RowParts,
    guessing: Speculation = NO_SPECULATION,
    followers: tuple[Lifecycle, ...] = (),
) -> ControlPlane:
    """Put together the parts that decide; `config` is `settled`. `followers` hear of rows that come and go."""
    pool, prefix = _pool_and_cache(config, limits)
    table, stopper = rows.table, rows.stopper
    batching = ContinuousBatching() if config.continuous_batching else StaticBatches()
    turns = TakeTurns(table, pool.num_blocks - 1, limits.block_size)
    whole = WholePrompts() if config.kv_cache else turns
    forks = SiblingForks(table, limits.block_size) if config.prefix_caching else NoForks()
    listeners = (stopper, batching, turns, rows.scores, forks, *guessing.listeners, *followers)
    memory = KVMemory(table, pool, prefix, limits.block_size, config.seed, listeners)
    memory.forks, memory.lookahead = forks, guessing.lookahead
    held = ForecastRoom if config.kv_cache else NothingHeld
    policies = Policies(
        chunks=ChunkedPrefill() if config.chunked_prefill else whole, batching=batching, room=held if config.paged else FreeSlabs
    )
    queue = ArrivalQueue() if config.order == "arrival" else GroupedQueue()
    scheduler = Scheduler(memory, queue, Budget(limits.max_num_seqs, limits.max_num_batched_tokens), policies)
    return ControlPlane(
        scheduler, memory, stopper, guessing.drafter, _retention(config, memory), rows.scores, guessing.clear, guessing.copy
    )


def _pool_and_cache(config: EngineConfig, limits: EngineLimits) -> tuple[KVPool, PrefixCache]:
    if not config.paged:
        slab = slab_blocks(limits.max_model_len, limits.block_size)
        return ContiguousPool((limits.num_blocks - 1) // slab, slab), NoPrefixCache()
    pool = BlockPool(limits.num_blocks)
    return pool, TriePrefixCache(pool, limits.block_size) if config.prefix_caching else NoPrefixCache()


def _retention(config: EngineConfig, memory: KVMemory) -> Retention:
    if config.kv_cache:
        return KeepKV()
    return RecomputeAll(memory) if config.paged else RecomputeInPlace(memory.table)
