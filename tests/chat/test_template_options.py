"""Tools, template variables and prefilled answers: what transformers renders, or the row's error."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from batchinfer.errors import ConfigError, InputError
from batchinfer.io.chat_options import MAX_DEPTH, MAX_TOOLS, ChatOptions, ChatReader, job_chat
from batchinfer.io.chat_template import ChatTemplate
from batchinfer.io.messages import clean_messages
from tests.oracle.tiny_models import build_tokenizer
from tests.tokenizer.test_chat_template import CHATML, LLAMA2, LLAMA3_TOOLS, SPECIAL

TOOL = {"type": "function", "function": {"name": "weather", "description": "ü", "parameters": {"type": "object", "properties": {}}}}
TALK = [{"role": "user", "content": " Where? "}, {"role": "assistant", "content": " In the "}]


def theirs(template: str) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=build_tokenizer(), chat_template=template, **SPECIAL)


def rendered(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate(template, "here", SPECIAL).render(messages, None, ChatOptions(**options))


@pytest.mark.parametrize("content", ["In the", " In the ", "a\nb", "user"])
@pytest.mark.parametrize("template", [CHATML, LLAMA2])
def test_a_prefilled_answer_is_what_transformers_renders(template: str, content: str) -> None:
    talk = [TALK[0], {"role": "assistant", "content": content}]
    ours = rendered(template, talk, continue_final=True)
    expected = theirs(template).apply_chat_template(talk, tokenize=False, continue_final_message=True)
    assert ours.rstrip() == expected.rstrip()  # white space at its end stays, also where a template trims
    assert ours.endswith(content)


def test_an_empty_beginning_stands_right_behind_the_turns_mark() -> None:
    assert rendered(CHATML, [TALK[0], {"role": "assistant", "content": ""}], continue_final=True).endswith("<|im_start|>assistant\n")


def test_a_template_that_drops_the_last_message_cannot_be_continued() -> None:
    with pytest.raises(InputError, match="nothing can go on with it") as error:
        rendered("{{ messages[0].content }}", TALK, continue_final=True)
    assert error.value.code == "template_error"


def test_tools_and_variables_reach_the_template() -> None:
    expected = theirs(LLAMA3_TOOLS).apply_chat_template(
        TALK[:1], tools=[TOOL], tokenize=False, add_generation_prompt=True, date_string="1 May"
    )
    assert rendered(LLAMA3_TOOLS, TALK[:1], tools=(TOOL,), variables={"date_string": "1 May"}) == expected
    assert "weather" in expected
    thinking = "{{ 'think' if enable_thinking else 'no' }}{{ documents is none }}{{ tools is none }}"
    assert rendered(thinking, TALK, variables={"enable_thinking": True}) == "thinkTrueTrue"
    assert rendered(thinking, TALK, variables={"enable_thinking": False}) == "noTrueTrue"


def test_arguments_of_earlier_calls_reach_the_template_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    [_, message] = clean_messages([*talk], "messages")
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert call["function"]["arguments"] == '{"x": 1}'  # the row itself stays as it was
    assert clean_messages(clean_messages(talk, "m"), "m") == clean_messages(talk, "m")
    odd = [*talk[:1], {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}]
    assert clean_messages(odd, "m")[1]["tool_calls"][0]["function"]["arguments"] == "{x"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tools", {"a": 1}, "must be a list"),
        ("tools", [1], r"tools\[0\] must be an object"),
        ("tools", [{"type": "web_search"}], "only functions"),
        ("tools", [{"type": "function", "function": {}}], "with a name"),
        ("tools", [{"function": {"name": "f", "parameters": "x"}}], "must be a JSON schema"),
        ("tools", [TOOL] * (MAX_TOOLS + 1), "at most"),
        ("tools", "[", "not JSON"),
        ("tool_choice", "required", "needs tools"),
        ("tool_choice", "always", "not understood"),
        ("tool_choice", {"type": "function", "function": {"name": "weather"}}, "needs tools"),
        ("parallel_tool_calls", 1, "true or false"),
        ("chat_template_kwargs", [1], "an object"),
        ("chat_template_kwargs", {"messages": []}, "'messages', which is not"),
        ("continue_final_message", "yes", "true or false"),
    ],
)
def test_wrong_chat_fields_are_errors_by_name(field: str, value: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        ChatReader(prefix="body.").read({field: value})
    assert str(error.value).startswith(f"body.{field}")


def test_depth_is_bounded_and_both_endings_are_refused() -> None:
    deep: Any = {}
    for _ in range(MAX_DEPTH + 1):
        deep = {"a": deep}
    with pytest.raises(InputError, match="levels deep"):
        ChatReader().read({"chat_template_kwargs": deep})
    with pytest.raises(InputError, match="both true"):
        ChatReader().read({"continue_final_message": True, "add_generation_prompt": True})


def test_a_rows_own_fields_win_over_the_jobs() -> None:
    job = job_chat('{"a": 1, "b": 2}', '[{"function": {"name": "f"}}]')
    reader = ChatReader(job)
    assert reader.read({"x": 1}) is job
    row = reader.read({"chat_template_kwargs": '{"b": 3}', "tool_choice": "none", "parallel_tool_calls": False})
    assert (dict(row.variables), row.tools, row.one_call) == ({"a": 1, "b": 3}, (), True)
    assert job.tool_names == {"f"}
    with pytest.raises(ConfigError, match="--tools holds text that is not JSON"):
        job_chat(None, "[")


@pytest.mark.parametrize(
    "hostile",
    [
        "{% set big = range(99999)|list %}{% for i in range(99999) %}{% if i in big %}{% endif %}{% endfor %}",
        "{% set big = range(99999)|list %}{% for i in range(99999) %}{% set x = big|sort %}{% endfor %}",
        "{% macro m(s) %}{{ m(s ~ 'x') }}{% endmacro %}{{ m('y' * 3000000) }}",
    ],
)
def test_work_that_is_large_in_every_turn_ends(monkeypatch: pytest.MonkeyPatch, hostile: str) -> None:
    monkeypatch.setattr("batchinfer.io.chat_sandbox.MAX_SECONDS", 0.3)
    with pytest.raises(InputError, match=r"the chat template (was stopped|failed: RecursionError)"):
        rendered(hostile, TALK)
