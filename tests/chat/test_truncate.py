"""Prompts that are too long: cut to the token, inside what was said, or left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.core.request import SamplingParams
from batchinfer.errors import InputError
from batchinfer.io.chat_options import ChatOptions
from batchinfer.io.chat_template import ChatTemplate
from batchinfer.io.options import POLICIES
from batchinfer.io.truncate import CUTS, Cutter, said_in
from tests.job.world import ByteTokenizer, World, read_jsonl, write_jsonl
from tests.tokenizer.test_chat_template import CHATML, LLAMA2, LLAMA3_TOOLS, SPECIAL

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "0123456789" * 3},
    {"role": "assistant", "content": "abcdefghij"},
    {"role": "user", "content": "  user ABCDEFGHIJ "},
]


def renderer(template: str) -> Any:
    compiled = ChatTemplate(template, "here", SPECIAL)
    return lambda messages: compiled.render(messages, None, ChatOptions(variables={"date_string": "1 May"}))


def cut(policy: str, text: str, limit: int, **params: Any) -> str:
    ids, _ = Cutter(policy, limit, ByteTokenizer()).cut_text(text, SamplingParams(**params))
    return bytes(ids.tolist()).decode()


def test_every_policy_is_known() -> None:
    assert set(CUTS) < set(POLICIES)


def test_raw_prompts_keep_exactly_the_room_beside_the_answer() -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    assert cut("truncate-left", text, 20, max_tokens=4) == text[-16:]
    assert cut("truncate-right", text, 20, max_tokens=4) == text[:16]
    assert cut("truncate-middle", text, 20, max_tokens=4) == text[:8] + text[-8:]
    assert cut("truncate-left", text, 20, max_tokens=512) == text[-10:]  # the answer gets half the context at most
    assert cut("truncate-left", text, 27, max_tokens=20) == text  # what fits stays whole


@pytest.mark.parametrize("template", [CHATML, LLAMA2, LLAMA3_TOOLS])
def test_what_was_said_is_found_in_any_template(template: str) -> None:
    render = renderer(template)
    text = render(TALK)
    found = [text[start:end] for start, end in said_in(text, TALK, False, render)]
    assert found == [message["content"].strip() for message in TALK[1:]]
    assert len(said_in(text, TALK, True, render)) == 2  # a prefilled answer is never cut


@pytest.mark.parametrize("policy", CUTS)
@pytest.mark.parametrize("limit", [190, 200])
def test_a_cut_conversation_keeps_its_template(policy: str, limit: int) -> None:
    render = renderer(CHATML)
    text = render(TALK)
    ids, gone = Cutter(policy, limit, ByteTokenizer()).cut_chat(TALK, False, render, SamplingParams(max_tokens=10))
    kept = bytes(ids.tolist()).decode()
    assert len(kept) == limit - 10 == len(text) - gone
    assert kept.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n")
    assert kept.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert [turn.split("\n")[0] for turn in kept.split("<|im_start|>")[1:]] == ["system", "user", "assistant", "user", "assistant"]
    assert ("ABCDEFGHIJ" in kept) == (policy != "truncate-right")
    assert ("user\n0123" in kept) == (policy != "truncate-left")


def test_a_template_longer_than_the_context_is_an_error() -> None:
    with pytest.raises(InputError, match="cannot be cut") as error:
        Cutter("truncate-left", 40, ByteTokenizer()).cut_chat(TALK, False, renderer(CHATML), SamplingParams(max_tokens=4))
    assert error.value.code == "too_long"


def test_a_template_that_changes_what_it_is_given_is_not_guessed_at() -> None:
    render = renderer("{% for m in messages %}{{ m.content|upper|replace('A', '') }}{{ m.content|length }}{% endfor %}")
    assert said_in(render(TALK), TALK, False, render) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=4), st.sampled_from(CUTS), st.integers(2, 200))
def test_any_conversation_is_cut_to_the_token_or_is_an_error(contents: list[str], policy: str, limit: int) -> None:
    talk = [{"role": "user", "content": content.encode("utf-8", "ignore").decode()} for content in contents]
    params = SamplingParams(max_tokens=3)
    try:
        ids, gone = Cutter(policy, limit, ByteTokenizer()).cut_chat(talk, False, renderer(CHATML), params)
    except InputError:
        return
    assert len(ids) < limit
    assert gone == 0 or len(ids) == Cutter(policy, limit, ByteTokenizer()).room(params)


def run(tmp_path: Path, policy: str, rows: list[Any], **options: Any) -> tuple[list[dict[str, Any]], Any, World]:
    world = World(max_model_len=64)
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    report = world.run(source, tmp_path / f"{policy}.jsonl", {"max_tokens": 4}, on_too_long=policy, **options)
    return read_jsonl(tmp_path / f"{policy}.jsonl"), report, world


@pytest.mark.parametrize("chat", [True, False])
def test_a_job_cuts_and_counts(tmp_path: Path, chat: bool) -> None:
    rows = [{"prompt": "short"}, {"prompt": "x" * 63}, {"prompt": "y" * 64}, {"prompt": "z" * 5000}, {"prompt_token_ids": [65] * 300}]
    out, report, _ = run(tmp_path, "truncate-middle", rows, chat=chat)
    assert [row["num_input_tokens"] for row in out][2:] == [60, 60, 60]
    assert all(row["error"] is None for row in out)
    assert (report.rows_truncated, report.exit_code) == (4 if chat else 3, 0)


def test_cut_ids_answer_as_the_same_ids_given(tmp_path: Path) -> None:
    ids = np.arange(200).tolist()
    rows = [{"prompt_token_ids": ids}, {"prompt_token_ids": ids[-60:]}]
    left, _, _ = run(tmp_path, "truncate-left", rows)
    assert left[0]["generated_text"] == left[1]["generated_text"]


def test_skipped_rows_are_neither_good_nor_failed(tmp_path: Path) -> None:
    rows = [{"prompt": "short"}, {"prompt": "y" * 64}, {"prompt": "z" * 5000}, {"prompt": 3}]
    out, report, _ = run(tmp_path, "skip", rows)
    assert [row["error"] and row["error"]["code"] for row in out] == [None, "skipped", "skipped", "invalid_prompt"]
    assert (report.rows_total, report.rows_ok, report.rows_failed, report.rows_skipped) == (4, 1, 1, 2)
    assert report.failed_positions == [(3, 3)]
    assert json.dumps(out[1]["generated_text"]) == "null"


def test_prompts_beyond_the_pool_stay_errors(tmp_path: Path) -> None:
    """A pool that changes no text must not decide where a prompt is cut."""
    out, report, _ = run(tmp_path, "truncate-left", [{"prompt_token_ids": [65] * 63}])
    assert out[0]["num_input_tokens"] == 63
    assert report.rows_truncated == 0


def test_a_skipped_row_does_not_end_a_strict_job(tmp_path: Path) -> None:
    _, report, _ = run(tmp_path, "skip", [{"prompt": "y" * 64}, {"prompt": "short"}], strict=True)
    assert (report.rows_ok, report.rows_skipped) == (1, 1)
