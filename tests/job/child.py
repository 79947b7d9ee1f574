"""A job in a process of its own, slow enough to be disturbed: `python -m tests.job.child INPUT OUTPUT [--flags]`."""

from __future__ import annotations

import argparse
import resource
import sys

from batchinfer.errors import BatchInferError
from tests.job.world import World


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("input")
    parser.add_argument("output")
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--file-limit", type=int, default=0, help="bytes that a file may have: a disk that is full")
    parser.add_argument("--max-tokens", type=int, default=5)
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--seqs", type=int, default=8)
    parser.add_argument("--stuck-after", type=int, help="steps until one never returns")
    parser.add_argument("--hang-s", type=float)
    parser.add_argument("--unordered", action="store_true")
    given = parser.parse_args()
    if given.file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (given.file_limit, given.file_limit))
    world = World(step_seconds=given.step_seconds, max_num_seqs=given.seqs, stuck_after=given.stuck_after, hang_s=given.hang_s)
    try:
        flags = {"chat": False, "overwrite": given.overwrite, "unordered": given.unordered}
        report = world.run(given.input, given.output, {"max_tokens": given.max_tokens}, **flags)
    except BatchInferError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(report.message, file=sys.stderr)
    print(f"ran {world.rows_run}", file=sys.stderr)
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
