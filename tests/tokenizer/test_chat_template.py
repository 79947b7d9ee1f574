"""Chat templates: what transformers renders, and nothing that a hostile template asks for."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from batchinfer.errors import InputError, ModelError
from batchinfer.io.chat_options import ChatOptions
from batchinfer.io.chat_sandbox import MAX_CHARACTERS, MAX_TURNS
from batchinfer.io.chat_template import ChatTemplate, choose_template, folder_template
from tests.oracle.tiny_models import build_tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3_TOOLS = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MACROS = """{%- macro show(role, content='', depth=0) %}
  [{{ role }}{% if depth %}/{{ depth }}{% endif %}] {{ content }}
  {%- if depth < 2 %}{{ show(role, content[:3], depth + 1) }}{% endif %}
{%- endmacro %}
{%- set ns = namespace(last=-1, seen=[]) %}
{%- for m in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.last < 0 and m.role == 'user' %}{% set ns.last = index %}{% endif %}
    {%- set ns.seen = ns.seen + [m.role] %}
    {%- if loop.index > 50 %}{% break %}{% endif %}
{%- endfor %}
{%- for m in messages if m.role != 'system' %}
    {%- if loop.first %}{{ loop.length }}:{% endif %}
    {{- show(m.role, m.content) }}{{ loop.cycle('a', 'b') }}{% if not loop.last %},{% endif %}
    {%- if loop.previtem is defined %}<{{ loop.previtem.role }}{% endif %}
{%- else %}nothing{% endfor %}
{% call(x) outer() %}{{ x }}!{% endcall %}
""".replace("{% call(x) outer() %}{{ x }}!{% endcall %}", "{% filter upper %}{{ ns.seen|join('-') }}{{ ns.last }}{% endfilter %}")
CALL = "{% macro twice() %}{{ caller('a') }}{{ caller('b') }}{% endmacro %}{% call(x) twice() %}{{ x ~ messages[0].content }}!{% endcall %}"
GENERATION = "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% continue %}{% endif %}{{ m.role }};{% endfor %}"
UNDEFINED = "{{ pad_token }}|{{ nothing }}|{% if nothing %}x{% endif %}{{ tools is none }}{{ documents is none }}{{ messages[0].missing is defined }}"
RECURSIVE = "{% for x in [[1, [2]], [3]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}"
SETBLOCK = "{% set text %}  {{ messages[0].content }}  {% endset %}{{ text|trim }}{% set n = text|length * 2 %}{{ n }}{{ '%s-%s'|format('a', 1) }}{{ 'é\"<>'|tojson }}"

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <there> & \"you\" 'é' 日本"}],
    [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c\n"},
    ],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": "prefilled"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": "{{ 7 * 7 }}{% raise %}"}],
]
TEMPLATES = {
    "chatml": CHATML,
    "llama2": LLAMA2,
    "llama3": LLAMA3_TOOLS,
    "macros": MACROS,
    "call": CALL,
    "generation": GENERATION,
    "undefined": UNDEFINED,
    "recursive": RECURSIVE,
    "setblock": SETBLOCK,
}


def render(source: str, messages: list[dict[str, Any]] | None = None, date: datetime | None = None, prompt: bool = True) -> str:
    return ChatTemplate(source, "here", SPECIAL).render(messages or CONVERSATIONS[0], date, ChatOptions(add_generation_prompt=prompt))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("index", range(len(CONVERSATIONS)))
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers_does(name: str, index: int, prompt: bool) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=build_tokenizer(), chat_template=TEMPLATES[name], **SPECIAL)
    messages = CONVERSATIONS[index]
    try:
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    except Exception as err:
        with pytest.raises(InputError, match=str(err)):
            render(TEMPLATES[name], messages, prompt=prompt)
        return
    assert render(TEMPLATES[name], messages, prompt=prompt) == expected


def test_the_date_is_the_one_given() -> None:
    assert "Today Date: 01 Feb 2023" in render(LLAMA3_TOOLS, date=datetime(2023, 2, 1))


def test_tool_calls_reach_the_template() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "ü"}}}]}
    assert '{"name": "f", "parameters": {"x": "ü"}}' in render(LLAMA3_TOOLS, [{"role": "user", "content": "a"}, call])


def test_the_templates_own_words_are_the_rows_error() -> None:
    with pytest.raises(InputError, match="Conversation roles must alternate") as caught:
        render(LLAMA2, [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    assert caught.value.code == "template_error"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].role }}",
        "{{ nothing.more }}",
        "{{ 1 / 0 }}",
        "{% for i in 5 %}{% endfor %}",
        "{% include 'x' %}",
        "{{ f() }}",
    ],
)
def test_whatever_fails_while_rendering_is_the_rows_error(source: str) -> None:
    with pytest.raises(InputError, match="chat template"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__self__.__class__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self._TemplateReference__context }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    messages = [{"role": "user", "content": "a"}]
    try:
        text = render(source, messages)
    except InputError:
        text = ""
    assert text == ""
    assert messages == [{"role": "user", "content": "a"}]


DOUBLING = "{% set ns = namespace(x=SEED) %}{% for i in range(90) %}{% set ns.x = STEP %}{% endfor %}"
HOSTILE = {
    "one long range": "{% for i in range(1000000000) %}{% endfor %}",
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "nested ranges with text": "{% for i in range(99999) %}{% for j in range(99) %}" + "x" * 1000 + "{% endfor %}{% endfor %}",
    "recursive loop": "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "macro calling itself": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(200) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "call block calling itself": "{% macro f(n) %}{% if n %}{% call f(n - 1) %}{% endcall %}{% call f(n - 1) %}{% endcall %}{% endif %}{% endmacro %}{{ f(100) }}",
    "doubling by +": DOUBLING.replace("SEED", "'ab'").replace("STEP", "ns.x + ns.x"),
    "doubling by ~": DOUBLING.replace("SEED", "'ab'").replace("STEP", "ns.x ~ ns.x"),
    "doubling by join": DOUBLING.replace("SEED", "'ab'").replace("STEP", "[ns.x, ns.x]|join"),
    "doubling by str.join": DOUBLING.replace("SEED", "'ab'").replace("STEP", "''.join([ns.x, ns.x])"),
    "doubling by format": DOUBLING.replace("SEED", "'ab'").replace("STEP", "'%s%s' % (ns.x, ns.x)"),
    "doubling by format filter": DOUBLING.replace("SEED", "'ab'").replace("STEP", "'%s%s'|format(ns.x, ns.x)"),
    "doubling by str.format": DOUBLING.replace("SEED", "'ab'").replace("STEP", "'{0}{0}'.format(ns.x)"),
    "doubling by replace": DOUBLING.replace("SEED", "'aa'").replace("STEP", "ns.x|replace('a', 'aa')"),
    "doubling by str.replace": DOUBLING.replace("SEED", "'aa'").replace("STEP", "ns.x.replace('a', 'aa')"),
    "doubling a list": DOUBLING.replace("SEED", "[1]").replace("STEP", "ns.x + ns.x"),
    "nesting a list": DOUBLING.replace("SEED", "[1]").replace("STEP", "[ns.x, ns.x]") + "{{ ns.x }}",
    "nesting a mapping": DOUBLING.replace("SEED", "[1]").replace("STEP", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x|tojson }}",
    "nesting a tuple": DOUBLING.replace("SEED", "[1]").replace("STEP", "(ns.x, ns.x)") + "{{ ns.x|string }}",
    "nesting by dict": DOUBLING.replace("SEED", "[1]").replace("STEP", "dict(a=ns.x, b=ns.x)") + "{{ ns.x }}",
    "squaring": DOUBLING.replace("SEED", "9").replace("STEP", "ns.x * ns.x"),
    "power": "{{ 10 ** 10 ** 10 }}",
    "repeated text": "{{ 'x' * 10000000000 }}",
    "repeated list": "{{ ([1] * 10000000000)|length }}",
    "ljust": "{{ 'x'.ljust(10000000000) }}",
    "zfill": "{{ 'x'.zfill(10000000000) }}",
    "expandtabs": "{{ ('\\t' * 100000).expandtabs(100000) }}",
    "center": "{{ 'x'|center(10000000000) }}",
    "indent": "{{ 'x'|indent(10000000000, true) }}",
    "tojson indent": "{{ [1]|tojson(indent=10000000000) }}",
    "format width": "{{ '%10000000000d' % 1 }}",
    "format star": "{{ '%*d' % (10000000000, 1) }}",
    "format filter": "{{ '%10000000000d'|format(1) }}",
    "str.format": "{{ '{:>10000000000}'.format(1) }}",
    "f-width by argument": "{{ '{:>{}}'.format(1, 10000000000) }}",
    "f-width by text": "{{ '{:>{}}'.format(1, '10000000000') }}",
    "long value many times": "{% set x = 'x' * 9999999 %}{{ '" + "%s" * 100 + "'|format(" + "x," * 100 + ") }}",
    "strftime": "{{ strftime_now('%Y' * 100000000) }}",
    "batch": "{{ [1]|batch(10000000000, 'x')|list }}",
    "long separator": "{{ range(99999)|join('x' * 1000000) }}",
    "set block": "{% set a %}{{ 'x' * 10000000 }}{% endset %}{% for i in range(99999) %}{{ a }}{% endfor %}",
    "capturing macro": "{% macro m() %}{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}{% endmacro %}{% set y = m() %}{% set z = m() %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_stopped(name: str) -> None:
    start = time.process_time()
    with pytest.raises(InputError, match="chat template"):
        render(HOSTILE[name])
    assert time.process_time() - start < 30  # not a speed claim: these would run for hours


def test_numbers_in_the_conversation_are_only_text() -> None:
    messages = [{"role": "user", "content": '{"id": 123456789012, "share": "%100000000d"}'}]
    source = "{{ 'a'.replace('a', messages[0].content) }}{{ '%s' % messages[0].content }}{{ '{}'.format(messages[0].content) }}"
    assert render(source, messages) == messages[0]["content"] * 3


def test_budgets_grow_with_the_conversation() -> None:
    long = [{"role": "user", "content": "x" * (MAX_CHARACTERS + 5)}]
    assert len(render("{{ messages[0].content ~ messages[0].content }}", long)) == 2 * MAX_CHARACTERS + 10
    letters = [{"role": "user", "content": "x" * 10}]
    assert render("{% for c in messages[0].content %}{{ c }}.{% endfor %}", letters) == "x." * 10
    assert MAX_TURNS >= 1_000_000


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m['content'] }",
        "{% endif %}",
        "{{ x|nosuchfilter }}",
        "{{ '" + "(" * 5 + " }}",
        "{{ " + "(" * 3000 + " }}",
    ],
)
def test_a_broken_template_is_refused_when_loading(source: str) -> None:
    with pytest.raises(ModelError, match="here: the chat template"):
        ChatTemplate(source, "here", {})


def test_where_a_folders_template_stands(tmp_path: Path) -> None:
    assert folder_template(tmp_path, {}) is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    found = folder_template(tmp_path, {"chat_template": named})
    assert found is not None
    assert found[0] == "D"
    (tmp_path / "chat_template.jinja").write_text("J\n")
    found = folder_template(tmp_path, {"chat_template": named})
    assert found is not None
    assert found[0] == "J\n"
    assert choose_template([named[0]], "x") == "T"
    assert choose_template([], "x") is None
    with pytest.raises(ModelError, match="no 'default' among a, b"):
        choose_template([{"name": "a", "template": ""}, {"name": "b", "template": ""}], "x")
    with pytest.raises(ModelError, match="neither a text nor a list"):
        choose_template(7, "x")
