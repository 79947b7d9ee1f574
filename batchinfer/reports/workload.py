"""Requests to measure with: the rows of a file, or a mix of requests (mixes.py); and parts of either."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from batchinfer.core.request import Request, Result
from batchinfer.errors import InputFileError
from batchinfer.reports.wording import plural

if TYPE_CHECKING:
    from batchinfer.build import ModelHandle
    from batchinfer.io.record import InputRow

LEAST_OUTPUT = 2  # tokens: a row without a second token has no inter-token latency


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

    @property
    def lengths(self) -> list[int]:
        """Most tokens of each row: its prompt and its `max_tokens`."""
        return [len(request.prompt_ids) + request.params.max_tokens for request in self.requests]

    @property
    def recomputed_tokens(self) -> float:
        """Tokens that an engine without a KV cache computes: for each output token all that stand before it."""
        return sum(r.params.max_tokens * (len(r.prompt_ids) + r.params.max_tokens / 2) for r in self.requests)

    @property
    def longest(self) -> int:
        """Most tokens of any row."""
        return max(self.lengths, default=0)

    def part(self, rows: int, output_share: float = 1.0, most_output: int | None = None) -> Workload:
        """The first rows, with outputs cut to a share of their lengths and to `most_output` tokens."""
        chosen = [_shortened(request, output_share, most_output) for request in self.requests[:rows]]
        return Workload(self.name, chosen)

    def shortest(self, rows: int, most_output: int) -> Workload:
        """The rows with the shortest prompts, in their order, with outputs cut to `most_output` tokens."""
        by_length = sorted(range(len(self.requests)), key=lambda index: len(self.requests[index].prompt_ids))
        chosen = [self.requests[index] for index in sorted(by_length[:rows])]
        return Workload(self.name, chosen).part(rows, most_output=most_output)

    def described(self) -> str:
        """For people: its name, rows and tokens."""
        most = "" if all(request.params.ignore_eos for request in self.requests) else "at most "
        return (
            f"{self.name}, {plural(len(self.requests), 'row')}, {self.prompt_tokens:,} prompt tokens, "
            f"{most}{self.most_output_tokens:,} output tokens"
        )


def _shortened(request: Request, share: float, most: int | None) -> Request:
    params = request.params
    wanted = max(LEAST_OUTPUT, round(params.max_tokens * share))
    tokens = min(params.max_tokens, wanted if most is None else min(wanted, most))
    if tokens == params.max_tokens:
        return request
    return replace(request, params=replace(params, max_tokens=tokens, min_tokens=min(params.min_tokens, tokens)))


@dataclass(frozen=True, slots=True)
class FileRows:
    """The rows of a workload file that can run, and how many cannot and why the first of these cannot."""

    workload: Workload
    left_out: int
    first_error: str


def read_workload(path: Path, model: ModelHandle, limit: int | None = None) -> FileRows:
    """The rows of a file of prompts, read, rendered and tokenised as `run` does it; `limit` takes the first rows only.

    A column `system` beside `prompt` becomes the row's system message. Raises `InputFileError` when no row can run.
    """
    from batchinfer.io.options import InputOptions
    from batchinfer.io.results import ResultColumns
    from batchinfer.job.rows_in import RowStream, find_input, open_rows

    options = InputOptions(input=str(path), limit=limit)
    stream = RowStream.open(find_input(options), options, ResultColumns())
    rows = open_rows(stream, model, {}, datetime.now())
    requests: list[Request] = []
    failed: list[Result] = []
    for item in rows.prepared(map(_system_first, stream.rows()) if rows.chat else stream.rows()):
        if isinstance(item, Result):
            failed.append(item)
        else:
            requests.append(replace(item, row=len(requests)))
    first = failed[0].error.message if failed and failed[0].error is not None else ""
    if not requests:
        raise InputFileError(f"{path}: no rows that can run" + (f"; the first: {first}" if first else ""))
    return FileRows(Workload(path.name, requests), len(failed), first)


def _system_first(row: InputRow) -> InputRow:
    """The row with its columns `system` and `prompt` as messages, where it has both."""
    values = row.values or {}
    system, prompt = values.get("system"), values.get("prompt")
    given = values.get("messages") is not None or values.get("prompt_token_ids") is not None
    if isinstance(system, str) and isinstance(prompt, str) and not given:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        row.values = {**{name: value for name, value in values.items() if name != "prompt"}, "messages": messages}
    return row
