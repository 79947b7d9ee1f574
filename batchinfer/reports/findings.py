"""What a plan warns of beyond rows that fail: prompts that are there twice, two BOS tokens, templates that surprise."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchinfer.core.request import Request, Result
from batchinfer.errors import InputError
from batchinfer.io.chat_options import ChatOptions
from batchinfer.io.options import InputOptions
from batchinfer.io.record import InputRow
from batchinfer.reports.wording import plural

if TYPE_CHECKING:
    from batchinfer.io.tokenizer import Tokenizer

SHOWN = 8
MAX_ROLES = 16
MARK = "zq7-mark-of-the-plan"
USER = {"role": "user", "content": "Hello"}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something worth a look before the job runs. `rows`: the first positions, where single rows are meant."""

    code: str
    message: str
    count: int = 0
    rows: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For a JSON report."""
        return {"code": self.code, "message": self.message, "count": self.count, "first_rows": list(self.rows)}


@dataclass(slots=True)
class _Rows:
    count: int = 0
    first: list[int] = field(default_factory=list)

    def add(self, row: int) -> None:
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append(row)

    def found(self, code: str, message: str) -> list[Finding]:
        """The finding, where there are such rows; `{}` in the message is their number."""
        return [Finding(code, message.format(plural(self.count, "row")), self.count, tuple(self.first))] if self.count else []


class PlanChecks:
    """Watches a job's rows as they are prepared."""

    def __init__(self, tokenizer: Tokenizer, options: InputOptions, chat: bool) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._chat = chat
        self._bos = bos_ids(tokenizer)
        self._marks = template_marks(tokenizer) if chat else None
        self._seen: set[int] = set()
        self._same, self._doubled, self._rendered, self._cut = _Rows(), _Rows(), _Rows(), _Rows()
        self._roles: dict[str, None] = {}
        self._tools = bool(options.job_chat.tools)

    def see(self, row: InputRow) -> None:
        """Look at a row's own values."""
        values = row.values or {}
        body = values.get("body") if isinstance(values.get("body"), dict) else values
        assert isinstance(body, dict)
        messages = body.get(self._options.messages_column or "messages")
        if isinstance(messages, list):
            for message in messages:
                role = message.get("role") if isinstance(message, dict) else None
                if isinstance(role, str) and len(self._roles) < MAX_ROLES:
                    self._roles[role] = None
        self._tools = self._tools or bool(body.get("tools"))
        prompt = values.get(self._options.prompt_column or "prompt")
        if self._marks is not None and isinstance(prompt, str) and self._marks.search(prompt):
            self._rendered.add(row.position)

    def watch(self, items: Iterable[Request | Result], was_cut: Any) -> Iterator[Request | Result]:
        """The same items, each looked at; `was_cut(row)` says whether its prompt was cut to fit."""
        for item in items:
            if isinstance(item, Request):
                ids = item.prompt_ids
                mark = hash(ids.tobytes())  # 8 bytes a row instead of the prompt itself
                if mark in self._seen:
                    self._same.add(item.row)
                self._seen.add(mark)
                if len(ids) > 1 and ids[0] == ids[1] and int(ids[0]) in self._bos:
                    self._doubled.add(item.row)
                if was_cut(item.row):
                    self._cut.add(item.row)
            yield item

    def findings(self) -> tuple[Finding, ...]:
        """Everything worth a look, rows first."""
        return (
            *self._same.found("identical_prompts", "{} with a prompt that is there before, token for token; each is run"),
            *self._doubled.found("double_bos", "{} with two BOS tokens at the beginning: the text holds one, and another is added"),
            *self._rendered.found(
                "rendered_prompt",
                "{} with special tokens of the chat template in the prompt, which is wrapped once more; --no-chat sends it as it is",
            ),
            *self._cut.found("truncated", f"{{}} with a prompt that is cut to fit (--on-too-long {self._options.on_too_long})"),
            *self._of_template(),
        )

    def _of_template(self) -> Iterator[Finding]:
        if not self._tokenizer.has_chat_template:
            if self._roles:
                yield Finding(
                    "no_chat_template", "this model has no chat template: rows with messages cannot run; give their text as `prompt`"
                )
            return
        if self._chat or self._roles:
            roles = dict.fromkeys([*self._roles, *(["system"] if self._options.system_prompt is not None else [])])
            yield from template_findings(self._tokenizer, list(roles), self._tools)


def template_findings(tokenizer: Tokenizer, roles: list[str], tools: bool) -> Iterator[Finding]:
    """What the template does with a generation prompt, with roles, and with tools, tried out."""

    def rendered(messages: list[dict[str, Any]], **options: Any) -> str | InputError:
        try:
            return tokenizer.render_chat(messages, options=ChatOptions(**options))
        except InputError as error:
            return error

    plain = rendered([USER])
    if isinstance(plain, str) and plain == rendered([USER], add_generation_prompt=False):
        yield Finding(
            "no_generation_prompt",
            "the chat template writes no generation prompt: the model may go on with the question instead of answering",
        )
    for role in roles:
        if role == "user":
            continue
        text = rendered(_talk_with(role))
        if isinstance(text, InputError):
            yield Finding("role_refused", f"the chat template refuses a conversation with the role {role!r}: {text}")
        elif MARK not in text:
            yield Finding("role_dropped", f"the chat template leaves out what the role {role!r} says: the model never sees it")
    if tools:
        text = rendered([USER], tools=({"type": "function", "function": {"name": MARK, "description": "", "parameters": {}}},))
        if isinstance(text, InputError) or MARK not in text:
            yield Finding("tools_dropped", "the chat template does not write tool definitions: the model never sees the tools")


def _talk_with(role: str) -> list[dict[str, Any]]:
    said = {"role": role, "content": MARK}
    if role in ("system", "developer"):
        return [said, USER]
    if role == "tool":
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
        return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {**said, "tool_call_id": "call00000"}]
    return [USER, said, USER]


def bos_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that begin a text: the one that the checkpoint names, and the one that the tokenizer adds."""
    added = tokenizer.encode("", add_special_tokens=True)[:1]
    named = tokenizer.template.special_tokens.get("bos_token") if tokenizer.template is not None else None
    return frozenset(added) | (tokenizer.special_ids_of([named]) if named is not None else frozenset())


def template_marks(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """A pattern of the special tokens that the chat template writes."""
    template, vocabulary = tokenizer.template, tokenizer.vocabulary
    if template is None:
        return None
    names = (
        vocabulary.token_bytes[index].decode("utf-8", "replace") for index in sorted(vocabulary.special_ids) if index < vocabulary.size
    )
    used = [re.escape(name) for name in names if len(name) > 2 and name in template.source]
    return re.compile("|".join(used)) if used else None
