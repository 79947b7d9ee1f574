"""A finished output taken back to a partial file, without its failed rows: so that these can run again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from batchinfer.errors import OutputError
from batchinfer.io.durable import written_whole
from batchinfer.io.json_text import dump_json
from batchinfer.io.logprob_text import ASKED_NAMES, PROMPT_LOGPROBS
from batchinfer.io.openai_out import CHOICES, PROMPT_FIELD, REASONING_FIELD, line_id
from batchinfer.io.partial import encode_line
from batchinfer.io.record import InputRow
from batchinfer.io.results import ERROR, METRICS, NUM_GENERATED, NUM_INPUT, REASON, REASONING, TEXT, TOOL_CALLS, ResultColumns


def rebuild_partial(rows: Iterable[InputRow], output: Path, columns: ResultColumns, partial: Path) -> None:
    """Write `partial` with the good rows of `output`; `rows` are the input's, parsed."""
    stored = _stored_fields(output, columns)
    with written_whole(partial) as file:
        for row in rows:
            fields = next(stored, None)
            if fields is None:
                raise OutputError(f"{output}: has fewer rows than its input; --overwrite runs it again")
            if fields[ERROR] is None:
                file.write(encode_line(row.position, row.digest(), row.plain, dump_json(fields)[1:-1]))
    if next(stored, None) is not None:
        raise OutputError(f"{output}: has more rows than its input; --overwrite runs it again")


def rebuild_openai_partial(rows: Iterable[InputRow], output: Path, partial: Path) -> None:
    """The same for a file of OpenAI response lines, which holds good rows only; their ids say which row is whose."""
    answers = _answers(output)
    answer = next(answers, None)
    with written_whole(partial) as file:
        for row in rows:
            digest = row.digest()
            if answer is None or answer[0] != line_id(row.position, digest):
                continue
            file.write(encode_line(row.position, digest, row.plain, dump_json(answer[1])[1:-1]))
            answer = next(answers, None)
    if answer is not None:
        raise OutputError(f"{output}: holds an answer to a line that the input does not have; --overwrite runs the job again")


def _answers(output: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        for line in _line_rows(output):
            body = line["response"]["body"]
            choice = body["choices"][0]
            message = {"content": choice["text"]} if "text" in choice else choice["message"]
            usage, reason = body["usage"], choice["finish_reason"]
            yield (
                line["id"],
                {
                    TEXT: message["content"] or "",
                    REASON: "stop" if reason == "tool_calls" else reason,
                    NUM_INPUT: usage["prompt_tokens"],
                    NUM_GENERATED: usage["completion_tokens"],
                    ERROR: None,
                    TOOL_CALLS: message.get("tool_calls"),
                    REASONING: message.get(REASONING_FIELD),
                    METRICS: body.get(METRICS),
                    CHOICES: body[CHOICES],
                    **({PROMPT_LOGPROBS: body[PROMPT_FIELD]} if PROMPT_FIELD in body else {}),
                },
            )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise OutputError(f"{output}: is not as it was written ({error}); --overwrite runs the job again") from None


def _stored_fields(output: Path, columns: ResultColumns) -> Iterator[dict[str, Any]]:
    names = dict(zip(columns.plain_names, columns.names, strict=True))
    try:
        for row in _table_rows(output, list(columns.reserved)) if output.suffix.lower() == ".parquet" else _line_rows(output):
            asked = {name: row[columns.prefix + name] for name in ASKED_NAMES if row.get(columns.prefix + name) is not None}
            yield {plain: row[name] for plain, name in names.items()} | asked
    except (KeyError, TypeError, ValueError) as error:
        raise OutputError(f"{output}: is not as it was written ({error}); --overwrite runs the job again") from None


def _line_rows(output: Path) -> Iterator[dict[str, Any]]:
    with output.open("rb") as file:
        for line in file:
            yield json.loads(line)


def _table_rows(output: Path, names: list[str]) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(output) as file:
            for batch in file.iter_batches(1024, columns=[name for name in names if name in file.schema_arrow.names]):
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise ValueError(str(error).splitlines()[0]) from None
