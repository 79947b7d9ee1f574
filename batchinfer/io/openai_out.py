"""Response lines of OpenAI's batch format. Ids come from the row and its place, so that two runs compare."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from batchinfer.io.durable import written_whole
from batchinfer.io.join import RAW_COLUMN, Join
from batchinfer.io.json_rows import raw_text
from batchinfer.io.json_text import dump_json, encode_json
from batchinfer.io.logprob_text import (
    ALL_CALLS,
    ALL_LOGPROBS,
    ALL_REASONING,
    LOGPROBS,
    PROMPT_LOGPROBS,
    REASONS,
    TEXTS,
    chat_logprobs,
    text_logprobs,
)
from batchinfer.io.openai_rows import TEXT as TEXT_URL
from batchinfer.io.partial import PartialRow
from batchinfer.io.record import InputRow
from batchinfer.io.results import ERROR, METRICS, NUM_GENERATED, NUM_INPUT, REASON, REASONING, TEXT, TOOL_CALLS

CREATED = 0  # no clock: the same job gives the same bytes
FINISH_REASONS = {"stop": "stop", "length": "length", "repetition": "stop"}

REASONING_FIELD = "reasoning_content"  # the name that servers have made usual
CHOICES, PROMPT_FIELD = "choices", "prompt_logprobs"  # a body's; the first also of rows that come from a finished output

OUR_FAULTS = ("engine_", "internal_", "out_of_memory")  # codes of errors that the request is not to blame for


def errors_path(output: Path) -> Path:
    """The file that takes the failed lines."""
    return output.with_name(output.stem + ".errors.jsonl")


def response_lines(join: Join) -> Iterator[tuple[bytes, bool]]:
    """Yield (line, failed) for each row, in input order."""
    for row, stored in join.line_rows():
        yield response_line(join, row, stored)


def response_line(join: Join, row: InputRow, stored: PartialRow) -> tuple[bytes, bool]:
    """The row's (line, failed)."""
    join.source.parse(row)
    fields = stored.fields()
    failed = fields[ERROR] is not None
    record = _error_record(row, stored, fields[ERROR]) if failed else _answer_record(row, stored, fields, join.model)
    return encode_json(dump_json(record)) + b"\n", failed


def finish_openai(join: Join, output: Path) -> None:
    """Write answers and errors, each in its own file; without failed lines there is no error file."""
    errors = errors_path(output)
    any_failed = False
    with ExitStack() as stack:
        good = stack.enter_context(written_whole(output))
        bad: BinaryIO | None = None
        for line, failed in response_lines(join):
            if not failed:
                good.write(line)
                continue
            if bad is None:
                bad = stack.enter_context(written_whole(errors))  # closed first, so in place before the output is
                any_failed = True
            bad.write(line)
    if not any_failed:
        errors.unlink(missing_ok=True)


def line_id(position: int, digest: str) -> str:
    """The id of a row's response line."""
    return "batch_req_" + _hash(position, digest)


def _hash(position: int, digest: str) -> str:
    return blake2b(f"{position}:{digest}".encode(), digest_size=12).hexdigest()


def _envelope(row: InputRow, stored: PartialRow, status: int, body: dict[str, Any]) -> dict[str, Any]:
    custom_id = row.values.get("custom_id") if row.values is not None else None
    return {
        "id": line_id(row.position, stored.digest),
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": "req_" + _hash(row.position, stored.digest), "body": body},
        "error": None,
    }


def _answer_record(row: InputRow, stored: PartialRow, fields: dict[str, Any], model: str) -> dict[str, Any]:
    assert row.values is not None
    is_text = row.values["url"] == TEXT_URL
    prompt, generated = fields[NUM_INPUT], fields[NUM_GENERATED]
    body = {
        "id": ("cmpl-" if is_text else "chatcmpl-") + _hash(row.position, stored.digest),
        "object": "text_completion" if is_text else "chat.completion",
        "created": CREATED,
        "model": model,
        "choices": fields.get(CHOICES) or _choices(fields, is_text),
        "usage": {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated},
    }
    if PROMPT_LOGPROBS in fields:
        body[PROMPT_FIELD] = fields[PROMPT_LOGPROBS]
    if fields.get(METRICS) is not None:
        body[METRICS] = fields[METRICS]
    return _envelope(row, stored, 200, body)


def _choices(fields: dict[str, Any], is_text: bool) -> list[dict[str, Any]]:
    several = fields.get(TEXTS)
    parts = [fields] if several is None else [_part(fields, index) for index in range(len(several))]
    choices = []
    for index, part in enumerate(parts):
        said = {"text": part[TEXT]} if is_text else {"message": _message(part)}
        found = part.get(LOGPROBS)
        logprobs = None if found is None else text_logprobs(found) if is_text else chat_logprobs(found)
        calls = bool(part.get(TOOL_CALLS)) and part[REASON] == "stop"
        reason = "tool_calls" if calls else FINISH_REASONS[part[REASON]]
        choices.append({"index": index, **said, "logprobs": logprobs, "finish_reason": reason})
    return choices


def _part(fields: dict[str, Any], index: int) -> dict[str, Any]:
    """One of several answers, under the names that an only one has."""
    names = ((TEXT, TEXTS), (REASON, REASONS), (LOGPROBS, ALL_LOGPROBS), (TOOL_CALLS, ALL_CALLS), (REASONING, ALL_REASONING))
    return {one: fields[of_all][index] for one, of_all in names if fields.get(of_all) is not None}


def _message(fields: dict[str, Any]) -> dict[str, Any]:
    """The assistant's turn; without words beside its tool calls the content is null, as OpenAI has it."""
    calls = fields.get(TOOL_CALLS)
    message: dict[str, Any] = {"role": "assistant", "content": fields[TEXT] or None if calls else fields[TEXT], "refusal": None}
    if fields.get(REASONING) is not None:
        message[REASONING_FIELD] = fields[REASONING]
    if calls:
        message["tool_calls"] = calls
    return message


def _error_record(row: InputRow, stored: PartialRow, error: dict[str, str]) -> dict[str, Any]:
    code = error["code"]
    ours = code.startswith(OUR_FAULTS)
    kind = "server_error" if ours else "invalid_request_error"
    body = {"error": {"message": error["message"], "type": kind, "param": None, "code": code}}
    record = _envelope(row, stored, 500 if ours else 400, body)
    if row.values is None:
        record[RAW_COLUMN] = raw_text(row.raw)
    return record
