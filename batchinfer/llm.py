"""The Python interface: prompts in a list, results in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from batchinfer.build import JobNeed, build_engine, open_model
from batchinfer.config import EngineConfig
from batchinfer.core.request import Request, Result, SamplingParams
from batchinfer.engine import Engine
from batchinfer.errors import InputError
from batchinfer.io.chat_options import PLAIN_CHAT, ChatOptions
from batchinfer.io.tool_choice import CallWriter

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model ready to generate. Engine options are those of `EngineConfig` (and of the command line), by name.

    A prompt that cannot run (empty, too long, ids outside the vocabulary, parameters out of range) gives a `Result`
    whose `error` says why, and the others run. What is wrong with the call itself, such as a list of parameters of
    another length, raises `TypeError` or `ValueError`. One call at a time: an `LLM` is not for several threads.
    """

    def __init__(self, model: str | Path = "smollm2-135m", **options: Any) -> None:
        self._config = EngineConfig(model=str(model), **options)
        self._model = open_model(self._config)
        self._defaults = SamplingParams().updated(self._model.generation.defaults)
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """The engine, built at first use."""
        if self._engine is None:
            self._engine = build_engine(self._config, self._model)
        return self._engine

    @property
    def default_params(self) -> SamplingParams:
        """What a prompt without parameters gets: the model's own defaults over this package's."""
        return self._defaults

    def generate(self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, progress: bool = True) -> list[Result]:
        """Continue raw prompts (text, or token ids), without a chat template. Results stand in the order of the prompts.

        A string, or one sequence of integers, is one prompt.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer))
        return self._run([prompts] if single else list(prompts), self._encode_prompt, params, progress)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        options: ChatOptions = PLAIN_CHAT,
        progress: bool = True,
    ) -> list[Result]:
        """Answer conversations: lists of messages with `role` and `content`. One conversation may stand alone.

        `options` (`batchinfer.io.chat_options`) are tools, template variables, and whether the last message is a
        beginning that the answer goes on with, for all of them. Where they ask for tool calls that this model cannot be
        made to write, `InputError` is raised.
        """
        single = len(conversations) > 0 and isinstance(conversations[0], Mapping)
        rows = [conversations] if single else list(conversations)
        return self._run(rows, partial(self._encode_chat, options), self._with_calls(options, params), progress)

    def stream(self, requests: Iterable[Request | Result | None]) -> Iterator[Result]:
        """Yield results as they finish; requests are pulled lazily, so there may be any number of them.

        Giving the iterator up drops the rows that are not finished.
        """
        return self.engine.run(requests)

    def _encode_prompt(self, prompt: Any) -> Sequence[int]:
        if isinstance(prompt, str):
            return self._model.tokenizer.encode(prompt, add_special_tokens=True)
        return _token_ids(prompt)

    def _encode_chat(self, options: ChatOptions, conversation: Any) -> Sequence[int]:
        if isinstance(conversation, str | Mapping) or not all(isinstance(message, Mapping) for message in conversation):
            raise InputError("a conversation is a list of messages, each with role and content", "invalid_messages")
        text = self._model.tokenizer.render_chat([dict(message) for message in conversation], options=options)
        return self._model.tokenizer.encode(text, add_special_tokens=False)

    def _with_calls(self, options: ChatOptions, params: Params) -> Params:
        tokenizer = self._model.tokenizer
        must_be = CallWriter.of(tokenizer.tool_format, tokenizer.special_ids_of).structure(options)
        if must_be is None:
            return params
        own = self._defaults if params is None else params
        if isinstance(own, SamplingParams):
            return replace(own, structured_outputs=must_be)
        return [replace(each, structured_outputs=must_be) for each in own]

    def _run(self, rows: list[Any], encode: Callable[[Any], Sequence[int]], params: Params, progress: bool) -> list[Result]:
        if params is not None and not isinstance(params, SamplingParams) and len(params) != len(rows):
            raise ValueError(f"{len(params)} SamplingParams for {len(rows)} prompts; give one for all, or one each")
        requests = [self._request(row, prompt, encode, params) for row, prompt in enumerate(rows)]
        if self._engine is None:
            lengths = [len(r.prompt_ids) + r.params.max_tokens for r in requests if isinstance(r, Request) for _ in range(r.params.n)]
            self._engine = build_engine(self._config, self._model, JobNeed.of(self._config, self._model, lengths))
        found: list[Result | None] = [None] * len(rows)
        with tqdm(total=len(rows), unit="row", disable=not progress) as bar:
            for result in self._engine.run(requests):
                found[result.row] = result
                bar.update()
        results = [result for result in found if result is not None]
        assert len(results) == len(rows), "a row was lost"
        return results

    def _request(self, row: int, prompt: Any, encode: Callable[[Any], Sequence[int]], params: Params) -> Request | Result:
        own = self._defaults if params is None else params if isinstance(params, SamplingParams) else params[row]
        try:
            return Request(row, np.array(encode(prompt), np.int32), own.check())
        except InputError as error:
            return Result.failed(row, error)


def _token_ids(prompt: Any) -> list[int]:
    """Integers as int32 can hold them; anything else is that prompt's error."""
    if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes):
        raise InputError(f"a prompt is text or a list of token ids, got {type(prompt).__name__}", "invalid_prompt")
    for token_id in prompt:
        if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
            raise InputError(f"token ids are integers, got {str(token_id)[:40]!r} ({type(token_id).__name__})", "invalid_token_id")
        if not 0 <= token_id < 2**31:
            raise InputError(f"token id {token_id} is outside the vocabulary", "invalid_token_id")
    return [int(token_id) for token_id in prompt]
