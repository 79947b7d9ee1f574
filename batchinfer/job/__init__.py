"""The run job: rows in, results out. The faces (command line, panels) stand above it and watch through an observer."""

from __future__ import annotations

from batchinfer.io.options import InputOptions, OutputOptions
from batchinfer.job.records import JobInfo, JobObserver, JobParts, JobReport, JobSeconds, JobSnapshot, NullObserver

__all__ = [
    "InputOptions",
    "JobInfo",
    "JobObserver",
    "JobParts",
    "JobReport",
    "JobSeconds",
    "JobSnapshot",
    "NullObserver",
    "OutputOptions",
]
