"""Few combinations of settings that hold every pair of values."""

from __future__ import annotations

import itertools
import random
from typing import Any


def covering_runs(settings: dict[str, tuple[Any, ...]], seed: int = 0) -> list[dict[str, Any]]:
    """Few combinations in which every pair of values occurs (greedy all-pairs)."""
    rng = random.Random(seed)
    names = list(settings)
    missing = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in settings[a] for y in settings[b]}
    runs = []
    while missing:
        candidates = [{name: rng.choice(settings[name]) for name in names} for _ in range(60)]
        best = max(candidates, key=lambda run: sum(run[a] == x and run[b] == y for (a, x), (b, y) in missing))
        gain = {((a, x), (b, y)) for (a, x), (b, y) in missing if best[a] == x and best[b] == y}
        if gain:
            missing -= gain
            runs.append(best)
    return runs
