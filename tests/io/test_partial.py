"""The partial file: what goes in comes out, whatever is damaged is left out, any number of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.core.request import FinishReason, Result, RowError
from batchinfer.io.partial import PartialFile, encode_line, try_decode_line
from batchinfer.io.results import ResultColumns
from batchinfer.io.row_index import FIRST_ROWS, RowIndex

texts = st.text(st.characters(exclude_categories=()), max_size=30)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**40), texts, st.booleans(), st.booleans(), st.binary(max_size=3), st.integers(0, 400))
def test_a_line_comes_back_or_is_seen_to_be_damaged(row: int, text: str, plain: bool, failed: bool, junk: bytes, at: int) -> None:
    columns = ResultColumns(token_ids=True)
    ids = np.array([1, 2], np.int32)
    result = Result(row, text, FinishReason.STOP, ids, 3, error=RowError(text, text) if failed else None)
    line = encode_line(row, "0123456789abcdef", plain, columns.fragment(result))
    assert line.count(b"\n") == 1
    stored = try_decode_line(line)
    assert stored is not None
    assert (stored.row, stored.digest, stored.plain, stored.failed) == (row, "0123456789abcdef", plain, failed)
    fields = stored.fields()
    assert tuple(fields) == columns.plain_names
    assert fields["generated_text"] == (None if failed else text)
    damaged = line[:at] + junk + line[at + len(junk) :]
    assert damaged == line or try_decode_line(damaged) is None or damaged.rstrip(b"\n") == line.rstrip(b"\n")


def test_the_index_grows_and_forgets() -> None:
    index = RowIndex()
    rows = [0, 5, FIRST_ROWS - 1, FIRST_ROWS, 10 * FIRST_ROWS, 70 * FIRST_ROWS + 3]
    for offset, row in enumerate(rows):
        index.put(row, offset)
    assert [index.try_get(row) for row in rows] == list(range(len(rows)))
    assert index.num_rows == len(rows)
    assert index.try_get(1) is None
    assert index.try_get(10**9) is None
    index.put(5, 100)
    index.drop(0)
    assert (index.try_get(5), index.has(0), index.num_rows) == (100, False, len(rows) - 1)
    index.close()


def test_long_results_and_later_ones(tmp_path: Path) -> None:
    columns = ResultColumns()
    partial = PartialFile(tmp_path / "out.jsonl.partial")
    for row, size in ((3, 100_000), (1, 10), (3, 5)):
        result = Result(row, "x" * size, FinishReason.LENGTH, np.zeros(1, np.int32), 1)
        partial.append(row, "0" * 16, False, columns.fragment(result))
    partial.close()
    again = PartialFile(tmp_path / "out.jsonl.partial")
    stored = again.try_get(3)
    assert stored is not None
    assert stored.fields()["generated_text"] == "xxxxx"  # the later one counts
    assert again.found.rows == 2
    again.close()
