"""Whether a row can ever run, judged before it becomes a sequence: refused now, it never blocks the queue."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from batchinfer.core.request import Request, SamplingParams
from batchinfer.errors import InputError

MOST_KNOWN = 1024  # sets of parameters that are remembered as checked


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What this engine can hold, in tokens and rows."""

    max_model_len: int
    pool_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int


class CheckedOnce:
    """Checks parameters once, however many rows share them: known by identity, which holds while they are kept here."""

    def __init__(self) -> None:
        self._known: dict[int, SamplingParams] = {}

    def check(self, params: SamplingParams) -> None:
        """Raise `InputError` for a value that is wrong."""
        if self._known.get(id(params)) is params:
            return
        params.check()
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[id(params)] = params


def admissible(request: Request, limits: EngineLimits, vocab_size: int) -> Request:
    """The request with its ids as contiguous int32. Raises `InputError` when it could never run."""
    ids = request.prompt_ids
    num_prompt = len(ids)
    if num_prompt == 0:
        raise InputError("the prompt is empty: it has no tokens", "empty_prompt")
    if num_prompt >= limits.max_model_len:
        raise InputError(
            f"the prompt has {num_prompt:,} tokens; it must be shorter than max_model_len, {limits.max_model_len:,} tokens", "too_long"
        )
    if num_prompt > limits.pool_tokens:
        raise InputError(
            f"the prompt has {num_prompt:,} tokens; the KV pool holds {limits.pool_tokens:,} in all: raise --num-kv-blocks or --kv-cache-memory",
            "too_long",
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InputError(f"prompt token id {bad} is outside the tokenizer's vocabulary of {vocab_size:,} ids", "invalid_token_id")
    stops = request.params.stop_token_ids
    if any(token_id >= vocab_size for token_id in stops):
        raise InputError(f"stop_token_ids {max(stops)} is outside the tokenizer's vocabulary of {vocab_size:,} ids", "invalid_parameter")
    biased = [token_id for token_id, _ in request.params.logit_bias if token_id >= vocab_size]
    if biased:
        raise InputError(
            f"logit_bias: token id {biased[0]} is outside the tokenizer's vocabulary of {vocab_size:,} ids", "invalid_parameter"
        )
    if ids.dtype != np.int32 or not ids.flags.c_contiguous:
        return replace(request, prompt_ids=np.ascontiguousarray(ids, np.int32))
    return request


def token_limit(request: Request, limits: EngineLimits) -> tuple[int, bool]:
    """(total tokens at which the row ends with `length`, whether context or pool made that less than it asked for)."""
    wanted = len(request.prompt_ids) + request.params.max_tokens
    limit = min(wanted, limits.max_model_len, limits.pool_tokens + 1)  # the last token needs no KV
    return limit, limit < wanted
