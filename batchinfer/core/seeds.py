"""Seeds of rows: a row's noise depends on the job seed and its position, never on its neighbours or its slot."""

from __future__ import annotations

_MASK = 2**64 - 1


def row_seed(given: int | None, job_seed: int, row: int) -> int:
    """The 64-bit seed of a row's noise: its own if it has one, else derived from job seed and position.

    The derivation is two rounds of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), so that neighbouring positions
    and neighbouring job seeds share nothing.
    """
    if given is not None:
        return given & _MASK
    return _splitmix64((_splitmix64(job_seed & _MASK) + row) & _MASK)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of a row's answers: the first has the row's own."""
    return seed if choice == 0 else _splitmix64(seed ^ _splitmix64(choice))


def _splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
