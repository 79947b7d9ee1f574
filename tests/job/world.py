"""A model in one file: bytes for tokens, a template of one line a message, and the real engine over a fake forward pass."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from batchinfer.config import EngineConfig
from batchinfer.core.vocabulary import Vocabulary
from batchinfer.errors import InputError
from batchinfer.io.chat_options import PLAIN_CHAT, ChatOptions
from batchinfer.io.truncate import PlacedTokens
from batchinfer.job import InputOptions, JobParts, JobReport, OutputOptions, run_job
from tests.fakes import Setup, make_engine

EOS = 256
BYTES = Vocabulary(token_bytes=[bytes([i]) for i in range(256)] + [b""], special_ids=frozenset({EOS}), eos_ids=(EOS,))


@dataclass
class ByteTokenizer:
    """One token a byte."""

    vocabulary: Vocabulary = field(default_factory=lambda: BYTES)
    has_chat_template: bool = True
    refuse: str | None = None  # conversations with this text cannot be rendered

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        try:
            return [list(text.encode()) for text in texts]
        except UnicodeEncodeError:
            raise InputError("half a surrogate pair", "invalid_text") from None

    def min_tokens_of(self, text: str) -> int:
        return len(text)

    tool_format: Any = None

    def special_ids_of(self, texts: Any) -> frozenset[int]:
        return frozenset()

    def encode_placed(self, text: str, add_special_tokens: bool) -> PlacedTokens:
        pairs = [(index, byte) for index, char in enumerate(text) for byte in char.encode()]
        starts, ids = (np.array([pair[side] for pair in pairs], np.int32) for side in (0, 1))
        return PlacedTokens(ids, starts, starts + 1, np.zeros(len(ids), bool))

    def render_chat(self, messages: list[dict[str, Any]], *, date: object = None, options: ChatOptions = PLAIN_CHAT) -> str:
        if not self.has_chat_template:
            raise InputError("no chat template", "no_chat_template")
        if self.refuse is not None and any(self.refuse in message["content"] for message in messages):
            raise InputError("the template refuses", "template_error")
        text = "".join(f"{message['role']}:{message['content']}\n" for message in messages)
        return text[:-1] if options.continue_final else text + ">" * options.add_generation_prompt


@dataclass
class World:
    """Settings of the fake model, and what a job did with it."""

    chat: bool = True
    refuse: str | None = None
    max_model_len: int = 200
    max_num_seqs: int = 8
    defaults: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = "model-1"
    loads: int = 0
    need: int | None = None
    notes: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    rows_run: int = 0
    step_seconds: float = 0.0
    stuck_after: int | None = None  # never return from this step on
    hang_s: float | None = None
    stop_after: int | None = None  # raise after so many steps
    error: BaseException = field(default_factory=lambda: KeyError("power cut"))
    infos: list[Any] = field(default_factory=list)
    snapshots: list[Any] = field(default_factory=list)

    def parts(self) -> JobParts:
        return JobParts(
            self._open,
            self._build,
            lambda model: self.fingerprint,
            lambda report: {"rows": {"total": report.rows_total}},
            hang_s=self.hang_s,
        )

    def _open(self, config: EngineConfig) -> Any:
        tokenizer = ByteTokenizer(has_chat_template=self.chat, refuse=self.refuse)
        length = config.max_model_len or self.max_model_len
        return SimpleNamespace(tokenizer=tokenizer, generation=SimpleNamespace(defaults=self.defaults, notes=()), max_model_len=length)

    def _build(self, config: EngineConfig, model: Any, need: Any) -> Any:
        self.loads += 1
        self.need = need.pool_tokens
        setup = Setup(max_model_len=model.max_model_len, max_num_seqs=self.max_num_seqs, blocks=2000, vocabulary=BYTES, num_tokens=120)
        self.engine = make_engine(setup)
        return self.engine

    def started(self, info: Any) -> None:
        self.infos.append(info)

    def prompt_shown(self, text: str) -> None:
        self.prompts.append(text)

    def answer_shown(self, row: int, text: str) -> None:
        self.answers = [*getattr(self, "answers", []), row]

    def tick(self, snapshot: Any) -> None:
        self.snapshots.append(snapshot)

    def step(self, shape: Any) -> None:
        time.sleep(self.step_seconds)
        if self.stuck_after is not None:
            self.stuck_after -= 1
            if self.stuck_after < 0:  # native code that lets other threads run and hears of no signal
                hashlib.pbkdf2_hmac("sha256", b"x", b"y", 50_000_000)
        if self.stop_after is not None:
            self.stop_after -= 1
            if self.stop_after < 0:
                raise self.error

    def warn(self, text: str) -> None:
        self.note(text)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def run(
        self, source: Path | str, output: Path | str | None = None, sampling: dict[str, Any] | None = None, **options: Any
    ) -> JobReport:
        """A job with small answers; options go to whichever record knows them."""
        outputs = {name: options.pop(name) for name in list(options) if name in OutputOptions.__dataclass_fields__}
        inputs = {name: options.pop(name) for name in list(options) if name in InputOptions.__dataclass_fields__}
        config = EngineConfig(**options)
        out = OutputOptions(output=None if output is None else str(output), **outputs)
        given = {"max_tokens": 6} if sampling is None else sampling
        report = run_job(config, InputOptions(input=str(source), **inputs), out, given, self, self.parts())
        if hasattr(self, "engine"):
            self.rows_run = self.engine.stats.rows_finished
        return report


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Strict: no NaN, one object a line, every line ended."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in the output")

    data = path.read_bytes()
    assert not data or data.endswith(b"\n")
    return [json.loads(line.decode("utf-8"), parse_constant=refuse) for line in data.split(b"\n")[:-1]]


def leftovers(output: Path) -> list[str]:
    """Names beside the output that belong to a job, its report aside."""
    ends = (".partial", ".manifest.json", ".lock", ".tmp", ".stdin")
    return sorted(path.name for path in output.parent.iterdir() if path.name.endswith(ends))
