"""Speculation's part of the composition root: the setting to what guesses, and how far."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from batchinfer.build_model import Ground, ModelHandle, compute_target, data_plane, load_weights, open_model, step_cost
from batchinfer.config import EngineConfig
from batchinfer.core.admission import EngineLimits
from batchinfer.core.draft_length import AdaptiveDepth, AdaptiveLength, DraftDepth, DraftLength, FixedDepth, FixedLength
from batchinfer.core.drafts import NO_SPECULATION, Speculation
from batchinfer.core.ngram import NgramProposer
from batchinfer.errors import ConfigError

if TYPE_CHECKING:
    from batchinfer.ops.table import Choice

MOST_ADAPTIVE = 8  # tokens of a guess: the chance of a ninth is too small to matter
FAKE_LENGTH = 4  # where no step costs anything, nothing can be weighed


def draft_name(config: EngineConfig) -> str | None:
    """The draft model that is asked for."""
    kind, _, name = config.speculative.partition(":")
    return name if kind == "draft" else None


def open_draft(config: EngineConfig, model: ModelHandle) -> ModelHandle | None:
    """The draft model before its weights. Raises `ConfigError` where it cannot guess for this model."""
    name = draft_name(config)
    if name is None:
        return None
    if config.fake_model:
        raise ConfigError("--speculative draft: a fake model has no use for a draft model; use ngram")
    draft = open_model(replace(config, model=name, revision=None, max_model_len=None))
    mine, its = model.tokenizer.vocabulary, draft.tokenizer.vocabulary
    if list(mine.token_bytes) != list(its.token_bytes):
        raise ConfigError(
            f"--speculative draft:{name}: its tokenizer is not that of {config.model} ({its.size:,} and {mine.size:,} tokens); "
            "take a smaller model of the same family"
        )
    if draft.max_model_len < model.max_model_len:
        raise ConfigError(
            f"--speculative draft:{name}: its context is {draft.max_model_len:,} tokens, less than the {model.max_model_len:,} of this run; "
            f"add --max-model-len {draft.max_model_len}"
        )
    return replace(draft, max_model_len=model.max_model_len)


def choose_speculation(
    config: EngineConfig, model: ModelHandle, draft: ModelHandle | None, limits: EngineLimits, ground: Ground
) -> Speculation:
    """What guesses ahead over the rows of `ground`; a draft model is loaded here."""
    if draft is not None:
        return _with_draft_model(config, model, draft, limits, ground)
    if config.speculative == "off":
        return NO_SPECULATION
    length = _length(config, model)
    ngram = NgramProposer(ground.table, limits.block_size, limits.max_num_batched_tokens, length)
    return Speculation(ngram, (ngram.acceptance,), length.most)


def speculation_choices(config: EngineConfig) -> list[Choice]:
    """What is said of it at start; nothing where it is off."""
    from batchinfer.ops.table import Choice

    if config.speculative == "off":
        return []
    fixed = config.num_speculative_tokens
    return [Choice("speculation", config.speculative, f"always {fixed} tokens" if fixed else "as many tokens as pay, step by step")]


def _length(config: EngineConfig, model: ModelHandle) -> DraftLength:
    fixed = config.num_speculative_tokens or (FAKE_LENGTH if config.fake_model else None)
    return FixedLength(fixed) if fixed else AdaptiveLength(step_cost(config, model), MOST_ADAPTIVE)


def _with_draft_model(config: EngineConfig, model: ModelHandle, draft: ModelHandle, limits: EngineLimits, ground: Ground) -> Speculation:
    """The draft model obeys the same edits of its logits: what the model may not say is no guess."""
    from batchinfer.runtime.draft_model import DraftModelProposer
    from batchinfer.runtime.head import Shaping

    fixed = config.num_speculative_tokens
    depth: DraftDepth = FixedDepth(fixed) if fixed else AdaptiveDepth(step_cost(config, model), step_cost(config, draft), MOST_ADAPTIVE)
    target = compute_target(config, draft)
    guessing = replace(ground, shaping=Shaping(ground.shaping.editors))  # nobody asks how likely a guess is
    plane = data_plane(config, draft, target, load_weights(draft, target), guessing)
    proposer = DraftModelProposer(ground.table, plane, limits.block_size, limits.max_num_batched_tokens, depth)
    return Speculation(proposer, (proposer, proposer.acceptance), depth.most, plane.clear, plane.copy)
