"""The Python interface: prompts in a list, results in the same order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from batchinfer.build import JobNeed, build_engine, open_model
from batchinfer.config import EngineConfig
from batchinfer.core.request import Request, Result, SamplingParams
from batchinfer.engine import Engine
from batchinfer.errors import InputError

Message = Mapping[str, Any]
Prompt = str | Sequence[int]
Conversation = Sequence[Message]


class LLM:
    """A model ready to generate. Engine options are those of `EngineConfig` (and of the command line), by name.

    A prompt that cannot run (too long, empty) gives a `Result` whose `error` says why; it raises nothing.
    """

    def __init__(self, model: str = "smollm2-135m", **options: Any) -> None:
        self._config = EngineConfig(model=model, **options)
        self._model = open_model(self._config)
        self._defaults = SamplingParams().updated(self._model.generation.defaults)
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """The engine, built at first use; its KV pool serves any later call too."""
        if self._engine is None:
            self._engine = build_engine(self._config, self._model)
        return self._engine

    @property
    def default_params(self) -> SamplingParams:
        """What a prompt without parameters gets: the model's own defaults over this package's."""
        return self._defaults

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, *, progress: bool = True
    ) -> list[Result]:
        """Continue raw prompts (text, or token ids). Results stand in the order of the prompts."""
        rows = [prompts] if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)) else prompts
        return self._collect([self._request(row, prompt, self._params(params, row)) for row, prompt in enumerate(rows)], progress)  # type: ignore[arg-type]

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Result]:
        """Answer conversations: lists of messages with `role` and `content`. One conversation may stand alone."""
        rows = [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations
        return self._collect([self._chat_request(row, chat, self._params(params, row)) for row, chat in enumerate(rows)], progress)  # type: ignore[arg-type]

    def stream(self, requests: Iterable[Request | Result | None]) -> Iterator[Result]:
        """Yield results as they finish; requests are pulled lazily, so there may be any number of them."""
        return self.engine.run(requests)

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, row: int) -> SamplingParams:
        if params is None:
            return self._defaults
        return params.check() if isinstance(params, SamplingParams) else params[row].check()

    def _request(self, row: int, prompt: Prompt, params: SamplingParams) -> Request | Result:
        ids = self._model.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        return Request(row, np.array(ids, np.int32), params)

    def _chat_request(self, row: int, conversation: Conversation, params: SamplingParams) -> Request | Result:
        try:
            text = self._model.tokenizer.render_chat([dict(message) for message in conversation])
        except InputError as error:
            return Result.failed(row, error)
        return Request(row, np.array(self._model.tokenizer.encode(text, add_special_tokens=False), np.int32), params)

    def _collect(self, requests: list[Request | Result], progress: bool) -> list[Result]:
        if self._engine is None:
            lengths = [len(r.prompt_ids) + r.params.max_tokens for r in requests if isinstance(r, Request)]
            need = sum(sorted((min(n, self._model.max_model_len) for n in lengths), reverse=True)[: self._config.max_num_seqs or 1024])
            self._engine = build_engine(self._config, self._model, JobNeed(need))
        found: list[Result | None] = [None] * len(requests)
        with tqdm(total=len(requests), unit="row", disable=not progress) as bar:
            for result in self.engine.run(requests):
                found[result.row] = result
                bar.update()
        return [result for result in found if result is not None]
