"""Rows that ask for several answers (`n`): one sequence for each, and one result of all."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from batchinfer.core.request import Choice, Result
from batchinfer.core.sequences import Sequence


@dataclass(slots=True, eq=False)
class _Group:
    """The sequences of one row; results in the order of choices."""

    results: list[Result | None]
    num_ended: int = 0


@dataclass(slots=True)
class ChoiceGroups:
    """Holds back what has ended of a row until its last sequence has."""

    _groups: dict[int, _Group] = field(default_factory=dict)  # seq_id -> the row's group

    def add(self, seqs: list[Sequence]) -> None:
        """These sequences, in the order of choices, are one row's."""
        if len(seqs) > 1:
            group = _Group([None] * len(seqs))
            self._groups |= {seq.seq_id: group for seq in seqs}

    def ended(self, seq: Sequence, result: Result) -> list[Result]:
        """The row's result, if this was its last sequence. A row fails with the first of its choices that does."""
        group = self._groups.pop(seq.seq_id, None)
        if group is None:
            return [result]
        group.results[seq.choice] = result
        group.num_ended += 1
        if group.num_ended < len(group.results):
            return []
        return [_joined([part for part in group.results if part is not None])]

    def clear(self) -> None:
        """Forget rows that will never come back."""
        self._groups.clear()


def _joined(parts: list[Result]) -> Result:
    failed = next((part for part in parts if part.error is not None), None)
    if failed is not None:
        return failed
    return replace(
        parts[0],
        choices=tuple(Choice(part.text, part.finish_reason, part.token_ids, part.logprobs) for part in parts),
        num_preemptions=sum(part.num_preemptions for part in parts),
        clipped=any(part.clipped for part in parts),
    )
