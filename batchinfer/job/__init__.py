"""The run job: rows in, results out. The faces (command line, panels) stand above it and watch through an observer."""

from __future__ import annotations

from batchinfer.io.options import InputOptions, OutputOptions
from batchinfer.job.records import JobInfo, JobObserver, JobParts, JobReport, JobSeconds, JobSnapshot, NullObserver
from batchinfer.job.rows_in import JobRows, RowStream, open_rows
from batchinfer.job.run import run_job

__all__ = [
    "InputOptions",
    "JobInfo",
    "JobObserver",
    "JobParts",
    "JobReport",
    "JobRows",
    "JobSeconds",
    "JobSnapshot",
    "NullObserver",
    "OutputOptions",
    "RowStream",
    "open_rows",
    "run_job",
]
