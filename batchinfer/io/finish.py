"""The last step of a job: results joined with the input, written whole, put in place; may be interrupted and repeated."""

from __future__ import annotations

from pathlib import Path

from batchinfer.io.durable import written_whole
from batchinfer.io.join import Join
from batchinfer.io.jsonl_out import output_lines
from batchinfer.io.openai_out import finish_openai


def finish(join: Join, output: Path) -> None:
    """Write `output` in input order and rename it into place; the suffix decides the format."""
    if join.openai:
        finish_openai(join, output)
        return
    with written_whole(output) as file:
        if output.suffix.lower() == ".parquet":
            from batchinfer.io.parquet_out import write_parquet

            write_parquet(join, file)
        else:
            file.writelines(output_lines(join))
