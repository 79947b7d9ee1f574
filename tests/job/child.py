"""A job in a process of its own, slow enough to be disturbed: `python -m tests.job.child INPUT OUTPUT [STEP_SECONDS [FILE_LIMIT]]`."""

from __future__ import annotations

import resource
import sys

from batchinfer.errors import BatchInferError
from tests.job.world import World


def main() -> int:
    source, output, *more = sys.argv[1:]
    if len(more) > 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(more[1]), int(more[1])))
    try:
        report = World(step_seconds=float(more[0]) if more else 0.0).run(source, output, {"max_tokens": 5}, chat=False)
    except BatchInferError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(report.message, file=sys.stderr)
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
