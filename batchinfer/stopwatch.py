"""Where the wall time of a process goes, stage by stage: a stopwatch for those who ask, and its null twin."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, SourceFileLoader
from time import perf_counter
from types import ModuleType
from typing import Any, Protocol, Self, TypeVar

from batchinfer.machine import process_age_s

T = TypeVar("T")
BEFORE, OTHER = "interpreter, command line", "everything else"
PACKAGES = ("batchinfer", "torch", "numpy", "pyarrow", "tokenizers", "jinja2", "gguf", "huggingface_hub", "llguidance", "rich")


@dataclass(slots=True)
class StageTime:
    """One stage of a process. What other stages took that ran inside it is theirs."""

    name: str
    startup: bool  # before the end of the first step
    began: float  # seconds after the start of the process, the first time
    seconds: float = 0.0
    detail: str = ""


class Stopwatch(Protocol):
    """What the parts of a job tell about their time."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Count the time of a block as a stage's; the stage around it waits meanwhile."""

    def each(self, name: str, items: Iterable[T]) -> Iterable[T]:
        """The items, with the time that each takes to come counted as a stage's."""

    def say(self, name: str, detail: str) -> None:
        """Note what became of a stage of the start, such as `built`."""

    def stepped(self) -> None:
        """A step of the engine is done; the first one ends the start."""


class NoStopwatch:
    """Measures nothing."""

    stages: Sequence[StageTime] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Do nothing around the block."""
        return nullcontext()

    def each(self, name: str, items: Iterable[T]) -> Iterable[T]:
        """The items."""
        return items

    def say(self, name: str, detail: str) -> None:
        """Do nothing."""

    def stepped(self) -> None:
        """Do nothing."""


NO_STOPWATCH = NoStopwatch()


class StageWatch:
    """Divides a process's time among stages, so that they add up to its age. Other threads' stages are not heard.

    While it is entered, imports are stages too: one for each of `PACKAGES`, with what it imports that is none of them.
    """

    def __init__(self, age: Callable[[], float] = process_age_s, clock: Callable[[], float] = perf_counter) -> None:
        self._clock, self._thread = clock, threading.get_ident()
        self._offset = age() - clock()  # from the clock to seconds since the process started
        self._last = clock()
        self._startup = True
        self._open: list[str] = []
        first = StageTime(BEFORE, True, 0.0, self._last + self._offset)
        self._times = {(BEFORE, True): first}
        self._imports = _ImportFinder(self)

    def __enter__(self) -> Self:
        sys.meta_path.insert(0, self._imports)
        return self

    def __exit__(self, *error: object) -> None:
        sys.meta_path.remove(self._imports)

    @property
    def stages(self) -> Sequence[StageTime]:
        """What was measured so far, in the order of beginning, the present stage included."""
        self._charge()
        return sorted(self._times.values(), key=lambda time: (not time.startup, time.began))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time of a block as a stage's; the stage around it waits meanwhile."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def each(self, name: str, items: Iterable[T]) -> Iterable[T]:
        """The items, with the time that each takes to come counted as a stage's."""
        iterator = iter(items)
        end = object()
        while True:
            with self.stage(name):
                item: Any = next(iterator, end)
            if item is end:
                return
            yield item

    def say(self, name: str, detail: str) -> None:
        """Note what became of a stage of the start, such as `built`."""
        self._time_of(name, True).detail = detail

    def stepped(self) -> None:
        """A step of the engine is done; the first one ends the start."""
        if self._startup:
            self._charge("first step")
            self._startup = False

    def _charge(self, name: str | None = None) -> None:
        """Give the time since the last call to the innermost open stage, or to `name`."""
        now = self._clock()
        time = self._time_of(name or (self._open[-1] if self._open else OTHER), self._startup)
        time.seconds += now - self._last
        self._last = now

    def _time_of(self, name: str, startup: bool) -> StageTime:
        key = (name, startup)
        if key not in self._times:
            self._times[key] = StageTime(name, startup, self._last + self._offset)
        return self._times[key]


class _ImportFinder(MetaPathFinder):
    """Finds modules of the timed packages as the other finders do, and makes a stage of loading each."""

    def __init__(self, watch: StageWatch) -> None:
        self._watch = watch

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package = name.partition(".")[0]
        if package not in PACKAGES:
            return None
        stage = f"import {package}"
        with self._watch.stage(stage):
            found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((spec for spec in found if spec is not None), None)
        loader: Any = None if spec is None else spec.loader
        if type(loader) in (SourceFileLoader, ExtensionFileLoader):  # of one module alone; others may serve many
            for method in ("create_module", "exec_module"):
                setattr(loader, method, self._timed(stage, getattr(loader, method)))
        return spec

    def _timed(self, stage: str, load: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(subject: Any) -> Any:
            with self._watch.stage(stage):
                return load(subject)

        return timed


def choose_stopwatch(asked: bool) -> StageWatch | NoStopwatch:
    """A stopwatch where it is asked for."""
    return StageWatch() if asked else NO_STOPWATCH
