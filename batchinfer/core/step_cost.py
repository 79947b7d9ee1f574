"""What one engine step costs in seconds, from figures that were measured on a machine or derived from a data sheet.

A step is a ragged batch. Its time is a constant, the layers' time for so many tokens, the head's for so many logit
rows, and attention's, which grows with the context that is read. The quantities are those of `StepShape`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from batchinfer.core.stats import StepShape

Curve = tuple[tuple[float, float], ...]
"""(count, seconds) with ascending counts."""

FAR = float(2**40)  # where the last slope of a curve is followed to


@dataclass(frozen=True, slots=True, eq=False)
class StepCost:
    """Seconds of one engine step.

    `layers` and `head` are curves through measured points, zero at zero, straight between two points and beyond the
    last two; they never fall. `source` says in a word or two where the figures are from.
    """

    layers: Curve  # tokens in the step -> seconds of all layers, attention's reading not counted
    head: Curve  # logit rows -> seconds of the LM head and of sampling
    decode_read: float  # seconds a context token that a decoding row attends to
    prefill_pair: float  # seconds a pair of a span's token and one that it attends to
    constant: float  # seconds of any step
    source: str = "measured"
    _tables: tuple[np.ndarray, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Lay the curves out for look-up."""
        object.__setattr__(self, "_tables", (*_table(self.layers), *_table(self.head)))

    def seconds(self, num_tokens: Any, num_logits: Any, decode_context: Any = 0, prefill_attention: Any = 0.0) -> Any:
        """Seconds of steps of these sizes: float64, of the shape that the arguments broadcast to.

        `decode_context` and `prefill_attention` count as in `StepShape`. A span of a few drafts is dearer than its
        pairs say, since it reads its context for little work: count context + tokens once in `decode_context`.
        """
        tokens, token_seconds, rows, row_seconds = self._tables
        return (
            self.constant
            + np.interp(num_tokens, tokens, token_seconds)
            + np.interp(num_logits, rows, row_seconds)
            + self.decode_read * decode_context
            + self.prefill_pair * prefill_attention
        )

    def of(self, shape: StepShape) -> float:
        """Seconds of a step of this shape."""
        tokens = shape.num_decode + shape.num_prefill
        return float(self.seconds(tokens, shape.num_logits, shape.decode_context, shape.prefill_attention))

    def as_dict(self) -> dict[str, Any]:
        """For a JSON report: seconds."""
        return {
            "layers": [list(point) for point in self.layers],
            "head": [list(point) for point in self.head],
            "decode_read": self.decode_read,
            "prefill_pair": self.prefill_pair,
            "constant": self.constant,
            "source": self.source,
        }


def curve_of(points: Mapping[int, float]) -> Curve:
    """A curve through measured points; where a larger count seemed faster, the smaller one is no slower either.

    Other work on a machine only adds to a measurement, so of two that contradict each other the faster is the sounder.
    """
    counts = sorted(points)
    values = np.minimum.accumulate(np.array([points[count] for count in counts])[::-1])[::-1]
    return tuple((float(count), float(value)) for count, value in zip(counts, values, strict=True))


def _table(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """The curve's counts and seconds as arrays, with zero before them and a far point on the last slope behind."""
    assert curve, "a curve has at least one point"
    points = [(0.0, 0.0), *curve]
    (x0, y0), (x1, y1) = points[-2:]
    points.append((FAR, y1 + (FAR - x1) * (y1 - y0) / (x1 - x0)))
    counts, seconds = np.array(points, np.float64).T.copy()
    return counts, seconds
