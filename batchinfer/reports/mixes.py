"""Seeded mixes of requests with the shapes that offline jobs have, written in plain English and code.

Outputs have fixed lengths (end tokens are ignored), so that every setting does the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from batchinfer.core.request import Request, SamplingParams
from batchinfer.core.vocabulary import Vocabulary
from batchinfer.reports.texts import CODE, QUESTIONS, SENTENCES, SYSTEM_OPENINGS, TOPICS
from batchinfer.reports.workload import Workload

TOKENS_PER_CHARACTER = 0.22  # of English text, roughly
CHAT_TEMPERATURE = 0.7  # answers that are sampled go in circles less often than greedy ones, as real chats do
CHAT_PROMPT_MEDIAN, CHAT_PROMPT_SPREAD, CHAT_PROMPT_MOST = 60, 1.1, 1024  # tokens, and the width of the log-normal law
CHAT_OUTPUT_MEDIAN, CHAT_OUTPUT_SPREAD, CHAT_OUTPUT_MOST = 150, 0.8, 512
CHAT_SYSTEM_TOKENS = (80, 130, 180, 240)
PREFIX_SYSTEM_TOKENS = 550
LONG_PROMPT_TOKENS = (600, 3000)
SHORT_PROMPT_TOKENS = (60, 260)
SHORT_OUTPUT_TOKENS = (4, 16)


class TextModel(Protocol):
    """What a mix needs of a tokenizer."""

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations have a form of their own."""

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """Ids of each text."""

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        """The prompt text of a conversation."""


@dataclass(slots=True)
class _Writer:
    """Puts texts together, and keeps what was asked for until all of it is tokenised at once."""

    rng: np.random.Generator
    longest: int  # tokens of a prompt and its output together
    texts: list[str] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    chat: Callable[[str, str], str] = lambda system, user: f"{system}\n\n{user}"

    def ask(self, system: str, user: str, output: int, temperature: float = 0.0) -> None:
        """One request."""
        self.texts.append(self.chat(system, user))
        self.params.append(SamplingParams(max_tokens=max(2, min(output, self.longest // 3)), temperature=temperature, ignore_eos=True))

    def prose(self, tokens: float | np.integer[Any]) -> str:
        """Sentences in some order, as many as make about so many tokens."""
        parts: list[str] = []
        size = 0.0
        order = self.rng.permutation(len(SENTENCES))
        while size < tokens:
            sentence = SENTENCES[order[len(parts) % len(order)]]
            parts.append(sentence)
            size += TOKENS_PER_CHARACTER * len(sentence)
        return " ".join(parts)

    def question(self) -> str:
        """A question that a person could ask."""
        topic, other = self.rng.choice(len(TOPICS), 2, replace=False)
        return QUESTIONS[self.rng.integers(len(QUESTIONS))].format(topic=TOPICS[topic], other=TOPICS[other])

    def asked_about(self, tokens: float) -> str:
        """A question with some text before it, of about so many tokens in all."""
        question = self.question()
        left = tokens - TOKENS_PER_CHARACTER * len(question)
        return question if left < 15 else f"{self.prose(left)}\n\n{question}"

    def length(self, median: float, spread: float, most: int) -> int:
        """A length from a log-normal law."""
        return int(np.clip(round(float(np.exp(self.rng.normal(np.log(median), spread)))), 4, most))


def _chat(writer: _Writer, rows: int) -> None:
    systems = [f"{opening} {writer.prose(tokens - 20)}" for opening, tokens in zip(SYSTEM_OPENINGS, CHAT_SYSTEM_TOKENS, strict=True)]
    for row in range(rows):
        system = systems[writer.rng.integers(len(systems))] if row % 2 else ""
        prompt = writer.length(CHAT_PROMPT_MEDIAN, CHAT_PROMPT_SPREAD, CHAT_PROMPT_MOST)
        output = writer.length(CHAT_OUTPUT_MEDIAN, CHAT_OUTPUT_SPREAD, CHAT_OUTPUT_MOST)
        writer.ask(system, writer.asked_about(prompt), output, CHAT_TEMPERATURE)


def _shared_prefix(writer: _Writer, rows: int) -> None:
    system = f"{SYSTEM_OPENINGS[0]} {writer.prose(min(PREFIX_SYSTEM_TOKENS, writer.longest // 3))}"
    for _ in range(rows):
        writer.ask(system, writer.asked_about(writer.length(30, 0.5, 120)), writer.length(32, 0.5, 96))


def _long_prompt(writer: _Writer, rows: int) -> None:
    low, high = LONG_PROMPT_TOKENS
    for _ in range(rows):
        text = writer.prose(min(int(writer.rng.integers(low, high + 1)), writer.longest // 2 - 40))
        writer.ask("", f"{text}\n\nSummarise the text above in a few sentences.", writer.length(64, 0.4, 160))


def _short_answer(writer: _Writer, rows: int) -> None:
    for _ in range(rows):
        text = writer.prose(writer.rng.integers(*SHORT_PROMPT_TOKENS))
        user = f"{text}\n\nDoes this text mention {TOPICS[writer.rng.integers(len(TOPICS))]}? Answer with yes or no."
        writer.ask("", user, int(writer.rng.integers(SHORT_OUTPUT_TOKENS[0], SHORT_OUTPUT_TOKENS[1] + 1)))


def _repetitive(writer: _Writer, rows: int) -> None:
    for row in range(rows):
        if row % 2:
            source = CODE[writer.rng.integers(len(CODE))]
            user = f"Here is some code:\n\n{source}\nWrite exactly the same code again."
        else:
            source = writer.prose(writer.rng.integers(60, 160))
            user = f"Here is a text:\n\n{source}\n\nCopy the text word for word."
        writer.ask("", user, int(TOKENS_PER_CHARACTER * len(source)) + 8)


@dataclass(frozen=True, slots=True)
class Mix:
    """A kind of job: how it reads for people, how many rows it has unless told, and who writes them."""

    about: str
    rows: int
    write: Callable[[_Writer, int], None]


MIXES = {
    "chat": Mix("chats of all lengths, half of them behind one of four system prompts", 128, _chat),
    "shared-prefix": Mix("short questions behind one long system prompt", 128, _shared_prefix),
    "long-prompt": Mix("long texts to be summarised", 32, _long_prompt),
    "short-answer": Mix("texts of some length with a yes or no about each", 256, _short_answer),
    "repetitive": Mix("texts and code to be copied", 64, _repetitive),
}


def make_mix(name: str, tokenizer: TextModel, rows: int | None = None, seed: int = 0, longest: int = 8192) -> Workload:
    """The requests of a mix; the same for the same arguments and tokenizer. `longest`: tokens of a prompt and its output together."""
    mix = MIXES[name]
    chat = _chat_text(tokenizer) if tokenizer.has_chat_template else None
    writer = _Writer(np.random.default_rng(seed), longest)
    if chat is not None:
        writer.chat = chat
    mix.write(writer, rows or mix.rows)
    encoded = tokenizer.encode_batch(writer.texts, chat is None)
    requests = []
    for row, (ids, params) in enumerate(zip(encoded, writer.params, strict=True)):
        prompt = np.array(ids[-max(1, longest - params.max_tokens - 1) :], np.int32)
        requests.append(Request(row, prompt, params))
    return Workload(f"synthetic {name} mix, seed {seed}", requests)


def _chat_text(tokenizer: TextModel) -> Callable[[str, str], str]:
    def render(system: str, user: str) -> str:
        messages = [{"role": "system", "content": system}] if system else []
        return tokenizer.render_chat([*messages, {"role": "user", "content": user}])

    return render


def churn_mix(vocabulary: Vocabulary, rows: int, seed: int = 0, stops: Sequence[str] = ()) -> Workload:
    """The mix that host-cost targets are stated for: prompts of 100 to 700 tokens, half of them sharing a beginning, outputs of 100 to 300.

    Prompts are random ordinary tokens: what the host does depends on counts, not on what the tokens say.
    """
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
