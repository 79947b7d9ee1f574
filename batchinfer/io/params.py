"""A row's sampling parameters over the job's defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from batchinfer.core.request import SamplingParams
from batchinfer.errors import ConfigError, InputError

TEXT_PARAMETERS = ("stop", "bad_words")
KEPT_SETS = 4096  # distinct parameter sets remembered
PLAIN_BASE = SamplingParams()
OPENAI_BASE = SamplingParams(temperature=1.0)


def plain_number(value: Any) -> Any:
    """A table's number as Python's own int or float; what is no number stays what it is."""
    if isinstance(value, Decimal):
        return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
    if hasattr(value, "dtype") and hasattr(value, "item"):  # NumPy's
        return value.item()
    return value


def map_parameters(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Parameters from an Arrow map, whose values share one type: where that is text, numbers are read from it."""
    given: dict[str, Any] = {}
    for name, value in items:
        given[name] = value
        if isinstance(value, str) and name != "stop":
            try:
                given[name] = json.loads(value)
            except (ValueError, RecursionError):
                continue  # the refusal shows it as it stands
    return given


def value_of_text(name: str, value: Any) -> Any:
    """A parameter's value from a cell that is text: what the text spells as JSON, for `stop` and its like only lists of it."""
    if not isinstance(value, str):
        return value
    try:
        spelt = json.loads(value.lower() if value in ("True", "False") else value)  # as Python's own writers spell them
    except (ValueError, RecursionError):
        return value  # the refusal shows it as it stands
    return spelt if name not in TEXT_PARAMETERS or isinstance(spelt, list) else value


class ParamReader:
    """Checks parameters, and remembers the sets that it has seen: most rows of a file ask for the same."""

    def __init__(self, defaults: SamplingParams) -> None:
        self.defaults = defaults
        self._seen: dict[tuple[Any, ...], SamplingParams] = {}

    def read(self, given: dict[str, Any]) -> SamplingParams:
        """The defaults with `given` laid over them, or `InputError`."""
        if not given:
            return self.defaults
        try:
            key = (*given, *given.values(), *map(type, given.values()))
            known = self._seen.get(key)
        except TypeError:  # a list or an object among them: not remembered
            return self.defaults.updated(given)
        if known is None:
            known = self.defaults.updated(given)
            if len(self._seen) >= KEPT_SETS:
                self._seen.clear()
            self._seen[key] = known
        return known


def job_defaults(
    generation: Mapping[str, Any], given: Mapping[str, Any], base: SamplingParams = PLAIN_BASE
) -> tuple[SamplingParams, list[str]]:
    """What a row without parameters gets, and what of `generation_config.json` this version cannot honour."""
    params, notes = base, []
    for name, value in generation.items():
        try:
            params = params.updated({name: value})
        except InputError as error:
            notes.append(f"generation_config.json: {error}; left out")
    try:
        return params.updated(given), notes
    except InputError as error:
        raise ConfigError(f"sampling settings: {error}") from None
