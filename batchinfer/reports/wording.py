"""Numbers as people say them."""

from __future__ import annotations

from collections.abc import Sequence

OPERATIONS = ("matmul", "attention", "rms_norm", "silu_and_mul", "quantise", "sampling")


def in_words(seconds: float) -> str:
    """A duration: `0.8 s`, `42 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def in_short(seconds: float) -> str:
    """A duration as a clock shows it: `0:07`, `12:30`, `1:02:30`."""
    whole = int(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def in_bytes(count: float) -> str:
    """A size: `512 B`, `1.5 KiB`, `3.2 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def fitting(text: str, width: int) -> str:
    """The text cut to a width, with a mark where it was cut."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def plural(count: int, one: str, many: str | None = None) -> str:
    """A count with its noun: `1 row`, `2 rows`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def kernels_folded(choices: Sequence[str]) -> list[str]:
    """An engine's choices with those of kernels in one line; `doctor` lists them singly. A slow one keeps its own line too."""
    named = {choice.split(":")[0]: choice for choice in choices}
    kernels = [name for name in OPERATIONS if name in named]
    if not kernels:
        return list(choices)
    groups: dict[str, list[str]] = {}
    for name in kernels:
        groups.setdefault(_served_by(named[name]), []).append(name)
    told = "; ".join(f"{', '.join(names)} {chosen}" for chosen, names in groups.items())
    slow = [named[name] for name in kernels if ", slower (" in named[name]]
    where = next(i for i, choice in enumerate(choices) if choice.split(":")[0] in kernels)
    kept = [choice for choice in choices if choice.split(":")[0] not in kernels]
    return [*kept[:where], f"kernels: {told} (see batchinfer doctor)", *slow, *kept[where:]]


def _served_by(choice: str) -> str:
    """What a choice chose; of the native library also what it is built for."""
    chosen, _, reason = choice.split(": ", 1)[1].partition(" (")
    if chosen.startswith("reference"):
        return "plain torch"
    return f"native, {reason.removesuffix(')')}" if chosen == "native" else chosen
