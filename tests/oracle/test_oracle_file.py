"""The recorded greedy outputs belong to the prompts beside them, and each row can decide something."""

import json
from pathlib import Path

from tests.oracle.oracle_prompts import CHATS, RAW

ORACLE = json.loads((Path(__file__).parent / "smollm2_greedy.json").read_text(encoding="utf-8"))


def test_the_file_was_made_from_the_prompts():
    chats = {row["name"]: [(m["role"], m["content"]) for m in row["messages"]] for row in ORACLE["rows"] if "messages" in row}
    raw = {row["name"]: row["prompt"] for row in ORACLE["rows"] if "prompt" in row}
    assert (chats, raw) == (CHATS, RAW)


def test_no_row_hangs_on_rounding():
    assert min(row["margin"] for row in ORACLE["rows"]) > 1e-3


def test_every_row_runs_to_its_end():
    for row in ORACLE["rows"]:
        assert row["output_ids"][-1] == 2 or len(row["output_ids"]) == ORACLE["max_new_tokens"], row["name"]
