"""What of the output's settings fits the input, and what an earlier run left: looked at before anything is computed."""

from __future__ import annotations

from collections.abc import Callable

from batchinfer.errors import ConfigError
from batchinfer.io.options import OutputOptions
from batchinfer.io.partial import PartialFile
from batchinfer.io.places import Places
from batchinfer.job.rows_in import RowStream


def say_found(partial: PartialFile, note: Callable[[str], None]) -> None:
    """Say what an earlier run left and what of it had to be repaired."""
    found = partial.found
    if found.torn_bytes:
        note(f"{partial.path}: cut off a torn last line of {found.torn_bytes:,} bytes; its row runs again")
    if found.damaged_lines:
        note(f"{partial.path}: {found.damaged_lines:,} damaged lines; their rows run again")
    if found.rows:
        note(f"going on: {found.rows:,} rows are done already")


def check_openai(output: OutputOptions, places: Places) -> None:
    """OpenAI's response lines have a form of their own: what would change it is refused."""
    if places.is_parquet:
        raise ConfigError(f"-o {places.output}: answers to OpenAI batch lines are JSONL; give a name ending in .jsonl")
    for flag, given in {
        "--keep-columns": output.keep_columns is not None,
        "--drop-columns": bool(output.drop_columns),
        "--output-prefix": bool(output.prefix),
        "generated_token_ids": output.generated_token_ids,
    }.items():
        if given:
            raise ConfigError(f"{flag} is for plain rows; answers to OpenAI batch lines have a fixed form")


def check_kept(output: OutputOptions, stream: RowStream) -> None:
    """Raise `ConfigError` for a column named on the command line that a table does not have."""
    named = [*(output.keep_columns or ()), *output.drop_columns]
    if named and stream.files.is_table:
        from batchinfer.io.table_source import TableSource

        assert isinstance(stream.source, TableSource)
        unknown = [name for name in named if name not in stream.source.column_types]
        if unknown:
            raise ConfigError(f"no column {unknown[0]!r} in {stream.options.input}; columns: {', '.join(stream.source.column_types)}")


def unseen(output: OutputOptions, stream: RowStream) -> list[str]:
    """Warnings of columns named on the command line that no row so far has: a typing mistake, or a rare column."""
    if stream.files.is_table or not stream.window:
        return []
    seen = {name for row in stream.window if row.values is not None for name in row.values}
    return [
        f"{flag} {name}: no such column in {first_rows(len(stream.window))}"
        for flag, names in (("--keep-columns", output.keep_columns or ()), ("--drop-columns", output.drop_columns))
        for name in names
        if name not in seen
    ]


def no_rows(stream: RowStream) -> str:
    """Why there is nothing to do: an empty input, or none of its rows was asked for."""
    name = stream.options.input
    if next(iter(stream.source.rows(0, 1)), None) is None:
        return f"{name}: 0 rows found"
    return f"{name}: 0 rows chosen (--limit, --offset, --shard)"


def first_rows(count: int) -> str:
    """The rows that were looked at, in words."""
    return "the first row" if count == 1 else f"the first {count:,} rows"
