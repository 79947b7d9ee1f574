"""What only rows that ask for it carry: several answers, and how likely tokens were. As JSON members, and back in OpenAI's forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from batchinfer.core.request import Result
from batchinfer.core.token_logprobs import TokenLogprobs
from batchinfer.core.vocabulary import Vocabulary
from batchinfer.io.answers import Answer
from batchinfer.io.json_text import dump_json

TEXTS, REASONS = "generated_texts", "finish_reasons"
LOGPROBS, PROMPT_LOGPROBS, ALL_LOGPROBS = "output_logprobs", "output_prompt_logprobs", "all_output_logprobs"
ALL_CALLS, ALL_REASONING = "all_tool_calls", "all_reasoning"
ASKED_NAMES = (TEXTS, REASONS, ALL_CALLS, ALL_REASONING, LOGPROBS, ALL_LOGPROBS, PROMPT_LOGPROBS)
DIGITS = 6  # behind the point


def asked_members(result: Result, answers: list[Answer], vocabulary: Vocabulary) -> str:
    """JSON members, each with a comma before it, of what the row asked for; nothing for most rows.

    `answers` are the row's texts, taken apart.
    """
    if not result.choices and result.logprobs is None and result.prompt_logprobs is None:
        return ""
    members: dict[str, Any] = {}
    if result.choices:
        members[TEXTS] = [answer.text for answer in answers]
        members[REASONS] = [choice.finish_reason.value for choice in result.choices]
        apart: dict[str, list[Any]] = {
            ALL_CALLS: [answer.tool_calls for answer in answers],
            ALL_REASONING: [answer.reasoning for answer in answers],
        }
        members |= {name: found for name, found in apart.items() if any(part is not None for part in found)}
    if result.logprobs is not None:
        members[LOGPROBS] = entries(result.logprobs, result.token_ids, vocabulary)
        if result.choices:
            told = [(choice.logprobs, choice.token_ids) for choice in result.choices]
            members[ALL_LOGPROBS] = [entries(numbers, ids, vocabulary) for numbers, ids in told if numbers is not None]
    if result.prompt_logprobs is not None:
        assert result.prompt_ids is not None
        members[PROMPT_LOGPROBS] = entries(result.prompt_logprobs, result.prompt_ids, vocabulary)
    return "," + dump_json(members)[1:-1] if members else ""


def entries(numbers: TokenLogprobs, token_ids: np.ndarray, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """An object for each token: itself, and under `top` the likeliest ones of its place."""
    out = []
    for i, token_id in enumerate(token_ids.tolist()):
        entry = _entry(token_id, float(numbers.logprobs[i]), vocabulary)
        tops = zip(numbers.top_ids[i].tolist(), numbers.top_logprobs[i].tolist(), strict=True)
        known = not math.isnan(numbers.logprobs[i])
        entry["top"] = [_entry(other, logprob, vocabulary) for other, logprob in tops] if known else []
        out.append(entry)
    return out


def _entry(token_id: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    """`bytes` stands only where the token's text does not tell them: parts of a character."""
    raw = vocabulary.token_bytes[token_id]
    text = raw.decode("utf-8", "replace")
    entry: dict[str, Any] = {
        "token": text,
        "token_id": token_id,
        "logprob": round(logprob, DIGITS) + 0.0 if math.isfinite(logprob) else None,
    }
    if text.encode() != raw:
        entry["bytes"] = list(raw)
    return entry


def _bytes_of(entry: dict[str, Any]) -> list[int]:
    return entry["bytes"] if "bytes" in entry else list(entry["token"].encode("utf-8"))


def chat_logprobs(found: list[dict[str, Any]]) -> dict[str, Any]:
    """OpenAI's form in chat choices."""
    content = []
    for entry in found:
        tops = [{"token": top["token"], "logprob": top["logprob"], "bytes": _bytes_of(top)} for top in entry["top"]]
        content.append({"token": entry["token"], "logprob": entry["logprob"], "bytes": _bytes_of(entry), "top_logprobs": tops})
    return {"content": content, "refusal": None}


def text_logprobs(found: list[dict[str, Any]]) -> dict[str, Any]:
    """OpenAI's form in text completions; offsets count the characters of the tokens before."""
    offsets, length = [], 0
    for entry in found:
        offsets.append(length)
        length += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in found],
        "token_logprobs": [entry["logprob"] for entry in found],
        "top_logprobs": [
            {top["token"]: top["logprob"] for top in [*reversed(entry["top"]), entry]} if entry["top"] else None for entry in found
        ],
        "text_offset": offsets,
    }
