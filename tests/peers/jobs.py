"""The jobs that engines are measured on: files of rows that are given, and files that are made here, the same for the same seed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.build import open_model
from batchinfer.config import EngineConfig
from batchinfer.core.request import Request
from batchinfer.io.tokenizer import Tokenizer
from batchinfer.reports.mixes import make_mix
from batchinfer.reports.texts import QUESTIONS, SENTENCES, TOPICS
from tests.peers.schemas import SCHEMAS

START, JSON_SCHEMA, SHORT_ANSWERS = "start-up", "json-schema", "short-answers"
SHORT_ROWS, JSON_ROWS = 1000, 256
JSON_MAX_TOKENS, FIRST_ANSWER_TOKENS = 192, 8
Row = dict[str, Any]


class Figure(Enum):
    """What is told of a job."""

    FIRST_ANSWER = "seconds from the start of the process to the first answer"
    TOKENS = "output tokens a second, while generating"
    VALID_ANSWERS = "valid answers a second, while generating"
    WHOLE_JOB = "seconds from the start of the process to its end"


@dataclass(frozen=True, slots=True)
class Job:
    """A file of rows that every engine answers. `output_tokens`: of all rows, where lengths are fixed; None where they are not."""

    name: str
    figure: Figure
    path: Path
    rows: int
    prompt_tokens: int
    output_tokens: int | None
    longest: int  # most tokens of a row, prompt and output together

    def schemas(self) -> list[dict[str, Any]]:
        """The schema of every row, of a job whose rows have one."""
        return [row["response_format"]["json_schema"]["schema"] for row in read_rows(self.path)]


class WrongRows(Exception):
    """A workload file does not hold what an engine-independent row needs."""


def make_jobs(folder: Path, files: Sequence[Path], model: str, most_rows: int | None, seed: int) -> list[Job]:
    """All jobs, their rows written to `folder`, at most `most_rows` each. Raises `WrongRows`."""
    tokenizer = open_model(EngineConfig(model=model)).tokenizer
    made = [
        (START, Figure.FIRST_ANSWER, [first_row(tokenizer)]),
        *((path.stem, Figure.TOKENS, read_rows(path)) for path in files),
        (JSON_SCHEMA, Figure.VALID_ANSWERS, json_rows(tokenizer, JSON_ROWS, seed)),
        (SHORT_ANSWERS, Figure.WHOLE_JOB, short_rows(tokenizer, SHORT_ROWS, seed)),
    ]
    names = [name for name, _, _ in made]
    if len(set(names)) < len(names):
        raise WrongRows(f"two jobs of one name among {', '.join(names)}: name the workload files differently")
    return [write_job(folder / f"{name}.jsonl", figure, rows[:most_rows]) for name, figure, rows in made]


def write_job(path: Path, figure: Figure, rows: Sequence[Row]) -> Job:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    prompts, outputs = [len(row["prompt_token_ids"]) for row in rows], [row["max_tokens"] for row in rows]
    fixed = all(row.get("ignore_eos") for row in rows)
    longest = max(map(sum, zip(prompts, outputs, strict=True)))
    return Job(path.stem, figure, path, len(rows), sum(prompts), sum(outputs) if fixed else None, longest)


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSONL file. Raises `WrongRows`, which names the file, for one that not every engine can run alike."""
    try:
        with path.open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise WrongRows(f"{path}: {error}") from error
    for number, row in enumerate(rows, 1):
        for name, wanted in (("prompt_token_ids", list), ("max_tokens", int)):
            if not isinstance(row, dict) or not isinstance(row.get(name), wanted):
                raise WrongRows(f"{path}, line {number}: a row needs `{name}`, so that every engine gets the same work")
    if not rows:
        raise WrongRows(f"{path}: no rows")
    return rows


def first_row(tokenizer: Tokenizer) -> Row:
    """A short question: what a start-up ends with."""
    [prompt] = chats(tokenizer, ["What is the capital of France?"])
    return {**prompt, "id": "first", "max_tokens": FIRST_ANSWER_TOKENS, "ignore_eos": True, "temperature": 0}


def short_rows(tokenizer: Tokenizer, rows: int, seed: int) -> list[Row]:
    """The mix of `bench --mix short-answer`: a text, a question about it, 4 to 16 tokens of answer."""
    return [row_of(request, tokenizer) for request in make_mix("short-answer", tokenizer, rows, seed).requests]


def row_of(request: Request, tokenizer: Tokenizer) -> Row:
    params = request.params
    return {
        "id": f"short-{request.row}",
        "prompt": tokenizer.decode(request.prompt_ids, skip_special_tokens=False),
        "prompt_token_ids": request.prompt_ids.tolist(),
        "max_tokens": params.max_tokens,
        "ignore_eos": params.ignore_eos,
        "temperature": params.temperature,
    }


def json_rows(tokenizer: Tokenizer, rows: int, seed: int) -> list[Row]:
    """Texts, each to be answered as a record of one of several schemas."""
    rng = np.random.default_rng(seed)
    asked = [list(SCHEMAS.items())[row % len(SCHEMAS)] for row in range(rows)]
    prompts = []
    for name, schema in asked:
        text = " ".join(SENTENCES[index] for index in rng.choice(len(SENTENCES), 3, replace=False))
        topic, other = (TOPICS[index] for index in rng.choice(len(TOPICS), 2, replace=False))
        question = QUESTIONS[rng.integers(len(QUESTIONS))].format(topic=topic, other=other)
        prompts.append(
            f"{text} {question}\n\nInvent {name} that fits this text, as JSON with the members {', '.join(schema['properties'])}."
        )
    made = []
    for row, (prompt, (name, schema)) in enumerate(zip(chats(tokenizer, prompts), asked, strict=True)):
        form = {"type": "json_schema", "json_schema": {"name": name.split()[-1], "schema": schema}}
        wanted = {"max_tokens": JSON_MAX_TOKENS, "ignore_eos": False, "temperature": 0, "response_format": form}
        made.append({"id": f"json-{row}", **prompt, **wanted})
    return made


def chats(tokenizer: Tokenizer, prompts: Iterable[str]) -> list[Row]:
    """Each prompt as one turn of a conversation, where the model has such a form, and its token ids."""
    chat = tokenizer.has_chat_template
    texts = [tokenizer.render_chat([{"role": "user", "content": prompt}]) if chat else prompt for prompt in prompts]
    encoded = tokenizer.encode_batch(texts, not chat)
    return [{"prompt": text, "prompt_token_ids": ids} for text, ids in zip(texts, encoded, strict=True)]
