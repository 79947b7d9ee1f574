"""Requests to measure with: a workload file, or a seeded mix shaped like real chats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from batchinfer.core.request import PARAMETER_NAMES, Request, SamplingParams
from batchinfer.core.vocabulary import Vocabulary
from batchinfer.errors import InputError, InputFileError

CHAT_ROWS = 128
CHAT_PROMPT_MEDIAN, CHAT_PROMPT_SPREAD = 60, 1.1  # tokens, and the width of the log-normal law: first turns of real chats
CHAT_OUTPUT_MEDIAN, CHAT_OUTPUT_SPREAD = 150, 0.8
CHAT_PROMPT_MOST, CHAT_OUTPUT_MOST = 1024, 512
CHAT_SYSTEMS, CHAT_SYSTEM_LENGTHS = 4, (80, 240)
TOKENISED_AT_ONCE = 256


class TextModel(Protocol):
    """What a workload needs of a tokenizer."""

    vocabulary: Vocabulary
    has_chat_template: bool

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """Ids of each text."""

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        """The prompt text of a conversation."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with a name; rows are numbered from 0."""

    name: str
    requests: list[Request]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt_ids) for request in self.requests)

    @property
    def most_output_tokens(self) -> int:
        """Tokens of all outputs, were every row to use its `max_tokens`."""
        return sum(request.params.max_tokens for request in self.requests)


def chat_mix(vocabulary: Vocabulary, seed: int = 0, rows: int = CHAT_ROWS, longest: int = CHAT_PROMPT_MOST + CHAT_OUTPUT_MOST) -> Workload:
    """A seeded mix of chats: log-normal lengths, half of the rows behind one of four shared system prompts.

    Prompts are random ordinary tokens: the time of a step depends on counts, not on what the tokens say. Outputs have
    fixed lengths (end tokens are ignored), so that every engine and setting does the same work.
    """
    rng = np.random.default_rng(seed)
    ordinary = ordinary_ids(vocabulary)
    systems = [rng.choice(ordinary, rng.integers(*CHAT_SYSTEM_LENGTHS)) for _ in range(CHAT_SYSTEMS)]
    prompts = _lengths(rng, rows, CHAT_PROMPT_MEDIAN, CHAT_PROMPT_SPREAD, min(CHAT_PROMPT_MOST, longest // 2))
    outputs = _lengths(rng, rows, CHAT_OUTPUT_MEDIAN, CHAT_OUTPUT_SPREAD, min(CHAT_OUTPUT_MOST, longest // 4))
    requests = []
    for row in range(rows):
        own = rng.choice(ordinary, prompts[row])
        shared = systems[rng.integers(CHAT_SYSTEMS)] if row % 2 else own[:0]
        ids = np.concatenate([shared, own]).astype(np.int32)[: longest // 2]
        requests.append(Request(row, ids, SamplingParams(max_tokens=int(outputs[row]), ignore_eos=True)))
    return Workload(f"synthetic chat mix, seed {seed}", requests)


def churn_mix(vocabulary: Vocabulary, rows: int, seed: int = 0, stops: Sequence[str] = ()) -> Workload:
    """The mix that host-cost targets are stated for: prompts of 100 to 700 tokens, half of them sharing a beginning, outputs of 100 to 300."""
    rng = np.random.default_rng(seed)
    ordinary = ordinary_ids(vocabulary)
    shared = [rng.choice(ordinary, 64) for _ in range(16)]
    params = SamplingParams(max_tokens=100, ignore_eos=True, stop=tuple(stops))
    by_length = {length: replace(params, max_tokens=length) for length in range(100, 301)}
    requests = []
    for row in range(rows):
        ids = rng.choice(ordinary, rng.integers(100, 701)).astype(np.int32)
        if row % 2:
            ids[:64] = shared[rng.integers(len(shared))]
        requests.append(Request(row, ids, by_length[int(rng.integers(100, 301))]))
    return Workload("churn: prompts 100 to 700 tokens, outputs 100 to 300", requests)


def ordinary_ids(vocabulary: Vocabulary) -> np.ndarray:
    """Ids of tokens that a text can hold: neither special nor empty."""
    special = vocabulary.special_ids
    return np.array([i for i, raw in enumerate(vocabulary.token_bytes) if raw and i not in special], np.int32)


def read_workload(path: Path, tokenizer: TextModel, limit: int | None = None) -> Workload:
    """The requests of a JSONL file: `prompt_token_ids`, `messages` or `prompt` (with `system`) and sampling parameters."""
    requests: list[Request] = []
    rows = _read_rows(path, limit)
    while batch := list(islice(rows, TOKENISED_AT_ONCE)):
        requests += _requests_of(path, batch, tokenizer, len(requests))
    if not requests:
        raise InputFileError(f"{path}: no rows")
    return Workload(path.name, requests)


def _requests_of(path: Path, rows: list[tuple[int, dict[str, Any]]], tokenizer: TextModel, first: int) -> list[Request]:
    texts: list[str] = []
    for line, row in rows:
        if row.get("prompt_token_ids") is None:
            texts.append(_prompt_text(path, line, row, tokenizer))
    encoded = iter(tokenizer.encode_batch(texts, not tokenizer.has_chat_template) if texts else [])
    requests = []
    for position, (line, row) in enumerate(rows, first):
        ids = row.get("prompt_token_ids")
        try:
            array = np.array(next(encoded) if ids is None else ids, np.int32)
            params = SamplingParams().updated({key: row[key] for key in row.keys() & PARAMETER_NAMES})
        except (InputError, ValueError, TypeError, OverflowError) as error:
            raise InputFileError(f"{path}, line {line}: {error}") from None
        if array.ndim != 1 or not len(array):
            raise InputFileError(f"{path}, line {line}: the prompt is empty")
        requests.append(Request(position, array, params))
    return requests


def _prompt_text(path: Path, line: int, row: dict[str, Any], tokenizer: TextModel) -> str:
    messages, prompt = row.get("messages"), row.get("prompt")
    if messages is None:
        if not isinstance(prompt, str):
            raise InputFileError(f"{path}, line {line}: needs prompt_token_ids, messages or prompt; has {', '.join(row)}")
        if not tokenizer.has_chat_template:
            return prompt
        system = [{"role": "system", "content": row["system"]}] if isinstance(row.get("system"), str) else []
        messages = [*system, {"role": "user", "content": prompt}]
    try:
        return tokenizer.render_chat(messages)
    except InputError as error:
        raise InputFileError(f"{path}, line {line}: {error}") from None


def _read_rows(path: Path, limit: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    taken = 0
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for line, text in enumerate(file, 1):
                if not text.strip() or (limit is not None and taken >= limit):
                    continue
                row = json.loads(text)
                if not isinstance(row, dict):
                    raise InputFileError(f"{path}, line {line}: must be a JSON object")
                taken += 1
                yield line, row
    except OSError as error:
        raise InputFileError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise InputFileError(f"{path}: not valid JSONL: {error}") from None


def _lengths(rng: np.random.Generator, count: int, median: float, spread: float, most: int) -> np.ndarray:
    return np.clip(np.exp(rng.normal(np.log(median), spread, count)).round().astype(np.int64), 4, max(4, most))
