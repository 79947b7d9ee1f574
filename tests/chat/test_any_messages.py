"""Whatever stands in messages and chat fields: a prompt or that row's error."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.core.request import SamplingParams
from batchinfer.errors import InputError, ModelError
from batchinfer.io.chat_options import CHAT_FIELDS, ChatReader
from batchinfer.io.chat_template import ChatTemplate
from batchinfer.io.messages import clean_messages
from batchinfer.io.truncate import CUTS, Cutter
from tests.job.world import ByteTokenizer
from tests.tokenizer.test_chat_template import CHATML, LLAMA2, LLAMA3_TOOLS, SPECIAL, TEMPLATES

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=12) | st.sampled_from(["text", "function", "{}", "[]", '{"a": 1}']),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "function", "name", "arguments", "parameters", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)
part = st.fixed_dictionaries({"type": st.just("text") | anything}, optional={"text": st.text(max_size=8) | anything})
call = st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": st.just("f"), "arguments": anything}) | anything})
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "x"]) | anything},
    optional={
        "content": st.text(max_size=20) | st.lists(part, max_size=3) | anything,
        "tool_calls": st.lists(call, max_size=2) | anything,
        "tool_call_id": anything,
        "reasoning_content": anything,
        "name": anything,
    },
)
fields = st.fixed_dictionaries({}, optional=dict.fromkeys(CHAT_FIELDS, anything | st.booleans()))


@settings(max_examples=200, deadline=None)
@given(st.lists(message, max_size=4) | anything, fields, st.sampled_from([CHATML, LLAMA2, LLAMA3_TOOLS]))
def test_any_messages_are_rendered_or_refused(messages: Any, given_fields: dict[str, Any], template: str) -> None:
    try:
        options = ChatReader().read(given_fields)
        cleaned = clean_messages(messages, "messages")
        text = ChatTemplate(template, "here", SPECIAL).render(cleaned, None, options)
    except InputError:
        return
    assert isinstance(text, str)
    assert "\uf8ff" not in text  # no mark of ours stays


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(TEMPLATES)), st.lists(st.text(max_size=40), min_size=1, max_size=3), st.sampled_from(CUTS), st.integers(20, 150)
)
def test_any_template_is_cut_to_the_token_or_refused(name: str, contents: list[str], policy: str, limit: int) -> None:
    compiled = ChatTemplate(TEMPLATES[name], "here", SPECIAL)
    talk = [{"role": "user", "content": content.encode("utf-8", "ignore").decode()} for content in contents]
    try:
        ids, _ = Cutter(policy, limit, ByteTokenizer()).cut_chat(
            talk, False, lambda m: compiled.render(m, None), SamplingParams(max_tokens=5)
        )
    except InputError:
        return
    assert len(ids) < limit


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                *(
                    "{% for m in messages %}",
                    "{% endfor %}",
                    "{{ m.content }}",
                    "{{ m['role'] }}",
                    "{% if add_generation_prompt %}",
                    "{% endif %}",
                ),
                *(
                    "{{ tools|tojson }}",
                    "{{ raise_exception('x') }}",
                    "{{ messages[0]['content'] * 100 }}",
                    "{% set messages = messages[1:] %}",
                ),
                *("{% macro f(x) %}", "{% endmacro %}", "{{ f(messages) }}", "{{ strftime_now('%Y') }}", "{{ bos_token }}", "{%- else %}"),
                *("{% generation %}", "{% endgeneration %}", "{{ messages|map(attribute='content')|join }}", "{{ loop.index }}", "text"),
            ]
        ),
        max_size=10,
    )
)
def test_any_template_renders_or_is_refused(pieces: list[str]) -> None:
    try:
        compiled = ChatTemplate("".join(pieces), "here", SPECIAL)
    except ModelError:
        return
    try:
        assert isinstance(compiled.render([{"role": "user", "content": "a"}], None), str)
    except InputError:
        return
