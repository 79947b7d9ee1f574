"""Compiled structures, each made once: ahead of the engine in threads of their own, or now where somebody waits.

The least recently used go when there are too many; a row that needs one of those again has it compiled again, in about
a millisecond.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from batchinfer.core.request import FinishReason, Request, Result
from batchinfer.core.structure import Structure
from batchinfer.errors import InputError
from batchinfer.runtime.grammar import Grammar, GrammarCompiler

MOST_KEPT = 2048
AHEAD = 64  # rows whose structures are compiled while the engine takes those before them
NUM_THREADS = 2  # the library gives up Python's lock while it compiles
PATIENCE_S = 0.01  # how long reading waits for a structure before the engine may step on
MOST_SHOWN = 200  # characters of an answer that a message quotes
_NOTHING = object()


class GrammarShelf:
    """Compiles and keeps. Safe to use from several threads."""

    def __init__(self, compiler: GrammarCompiler, most: int = MOST_KEPT) -> None:
        self.num_compiled = 0
        self._compiler = compiler
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[Structure, Future[Grammar]] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None

    def expect(self, structure: Structure) -> Future[Grammar]:
        """The structure compiled, or on its way to be; an `InputError` where it cannot be."""
        with self._lock:
            known = self._kept.get(structure)
            if known is not None:
                self._kept.move_to_end(structure)
                return known
            if self._threads is None:
                self._threads = ThreadPoolExecutor(NUM_THREADS, "grammar")
            made = self._kept[structure] = self._threads.submit(self._compiler.compile, structure)
            self.num_compiled += 1
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
            return made

    def grammar(self, structure: Structure) -> Grammar:
        """The compiled structure, waiting for it where needed. Raises `InputError` where it cannot be compiled."""
        try:
            return self.expect(structure).result()
        except InputError as error:
            raise InputError(str(error), error.code) from None  # one of its own: a shared one would gather every caller's trace

    def require(self, structure: Structure | None) -> None:
        """Compile it now if it is not. Raises `InputError` where that cannot be done."""
        if structure is not None:
            self.grammar(structure)

    def judged(self, result: Result, request: Request) -> Result:
        """The result of a request, or in its place the failed one of an answer that finished and is not what was asked for."""
        structure = request.params.structured_outputs
        if structure is None or result.finish_reason is not FinishReason.STOP:
            return result
        fault = self.fault(structure, result.text)
        return result if fault is None else Result.failed(result.row, fault, result.num_prompt_tokens)

    def fault(self, structure: Structure, text: str) -> InputError | None:
        """What is wrong with a finished text."""
        found = self.grammar(structure).judge(text)
        if found is None:
            return None
        shown = text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN // 2]} ... {text[-MOST_SHOWN // 2 :]}"
        return InputError(
            f"the finished answer does not satisfy {structure.title}: {found}; it reads {shown!r}", "structured_output_invalid"
        )

    def ahead(self, items: Iterator[Any], structure_of: Callable[[Any], Structure | None]) -> Iterator[Any]:
        """The items in order, each once its structure is compiled or has failed to be; None: nothing just now.

        Behind an item that asks for a structure, up to `AHEAD` more are read, so that theirs are compiled meanwhile.
        """
        waiting: deque[tuple[Any, Future[Grammar] | None]] = deque()
        exhausted = False
        while True:
            while not exhausted and len(waiting) < (AHEAD if waiting and waiting[0][1] is not None else 1):
                item = next(items, _NOTHING)
                if item is None:
                    break
                exhausted = item is _NOTHING
                if not exhausted:
                    structure = structure_of(item)
                    waiting.append((item, None if structure is None else self.expect(structure)))
            if not waiting:
                if exhausted:
                    return
                yield None
                continue
            future = waiting[0][1]
            ready = future is None or future.done() or bool(wait((future,), PATIENCE_S).done)
            yield waiting.popleft()[0] if ready else None
