"""Where a measurement's numbers come from: command, machine, versions, seeds, workload."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from batchinfer.machine import Machine, read_machine, read_versions
from batchinfer.reports.workload import Workload


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a report says of itself. `choices`: what was chosen rather than asked for, as sentences."""

    model: str
    workload: str
    rows: int
    prompt_tokens: int
    output_tokens: int
    seed: int
    choices: list[str] = field(default_factory=list)
    machine: Machine = field(default_factory=read_machine)
    versions: dict[str, str] = field(default_factory=read_versions)
    command: Sequence[str] = field(default_factory=lambda: tuple(sys.argv))

    @classmethod
    def of(cls, model: str, workload: Workload, seed: int) -> Provenance:
        """The provenance of numbers that are measured by this process."""
        return cls(model, workload.name, len(workload.requests), workload.prompt_tokens, workload.most_output_tokens, seed)

    def as_dict(self) -> dict[str, Any]:
        """For a JSON report."""
        return {
            "command": list(self.command),
            "model": self.model,
            "workload": self.workload,
            "workload_size": {"rows": self.rows, "prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens},
            "seeds": {"workload": self.seed, "job": self.seed},
            "choices": list(self.choices),
            "machine": self.machine.as_dict(),
            "versions": self.versions,
        }

    def line(self) -> str:
        """For people: the machine in a line."""
        return f"{self.machine.cpu}, {self.machine.cores} cores; {self.model}; {self.workload}"
