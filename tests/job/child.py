"""A job in a process of its own, slow enough to be disturbed: `python -m tests.job.child INPUT OUTPUT [--flags]`.

Without `--model` a fake model of some bytes stands in for a real one.
"""

from __future__ import annotations

import argparse
import resource
import sys
from typing import Any

from batchinfer.config import EngineConfig
from batchinfer.errors import BatchInferError
from batchinfer.job import InputOptions, JobParts, OutputOptions, run_job
from tests.job.world import World


def main() -> int:
    given = read_flags()
    if given.file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (given.file_limit, given.file_limit))
    try:
        message, code, num_run = run_real(given) if given.model else run_fake(given)
    except BatchInferError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(message, file=sys.stderr)
    print(f"ran {num_run}", file=sys.stderr)
    return code


def read_flags() -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("input")
    parser.add_argument("output")
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--file-limit", type=int, default=0, help="bytes that a file may have: a disk that is full")
    parser.add_argument("--max-tokens", type=int, default=5)
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--seqs", type=int, default=8)
    parser.add_argument("--stuck-after", type=int, help="steps until one never returns")
    parser.add_argument("--hang-s", type=float)
    parser.add_argument("--unordered", action="store_true")
    parser.add_argument("--asked", action="store_true", help="with the columns that a job may ask for, and chats")
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--token-ids", action="store_true")
    return parser.parse_args()


def run_fake(given: Any) -> tuple[str, int, int]:
    world = World(step_seconds=given.step_seconds, max_num_seqs=given.seqs, stuck_after=given.stuck_after, hang_s=given.hang_s)
    flags = {"chat": False, "overwrite": given.overwrite, "unordered": given.unordered}
    report = world.run(given.input, given.output, {"max_tokens": given.max_tokens}, **flags)
    return report.message, report.exit_code, world.rows_run


def run_real(given: Any) -> tuple[str, int, int]:
    config = EngineConfig(
        model=given.model, dtype=given.dtype, max_num_seqs=given.seqs, max_num_batched_tokens=16 * given.seqs, threads=1, device="cpu"
    )
    asked = {"generated_token_ids": given.token_ids, "reasoning_split": given.asked, "metrics": given.metrics}
    output = OutputOptions(given.output, overwrite=given.overwrite, **asked)
    world = World(step_seconds=given.step_seconds)
    sampling = {"max_tokens": given.max_tokens}
    report = run_job(
        config, InputOptions(given.input, chat=None if given.asked else False), output, sampling, world, JobParts(hang_s=given.hang_s)
    )
    return report.message, report.exit_code, report.stats.rows_finished


if __name__ == "__main__":
    sys.exit(main())
