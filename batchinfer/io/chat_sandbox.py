"""The Jinja sandbox that chat templates run in: the one transformers uses, with bounds on work and size added.

A template comes with a checkpoint, so it is a stranger's code. Jinja's sandbox keeps it from reaching Python; the
bounds keep it from running for ever or filling the memory. Every loop turn and macro call is counted, everything that
an expression makes is weighed, and all that is written is measured: the same conversation always gives the same
outcome. A clock of the processor time spent is only the last resort, for work that is large in every turn.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_TURNS = 1_000_000  # loop turns and macro calls, besides one for each character of the conversation
MAX_ITEMS = 200_000  # held in one list or mapping, however deep, besides one for each character of the conversation
MAX_CHARACTERS = 4 << 20  # written, or held in one value, besides what the conversation itself explains
GROWTH = 8  # how often a template may repeat the conversation
MAX_NUMBER = 1_000_000  # of characters or items asked for by number
MAX_ARGUMENT = 10_000  # characters of a string handed to a filter that repeats it
MAX_BITS = 512  # of a computed integer
MAX_SECONDS = 10.0  # of processor time for one rendering
LOOKS = 4  # payments between two looks at the clock
WIDTHS = re.compile(r"\d{7,}")
NESTED = re.compile(r":[^}]*\{")
# Names that no template can write down, so that none can replace what stands under them.
BUDGET, COUNTED, MEASURED = "the budget", "counted turns", "measured value"


class TemplateBoundError(Exception):
    """A template asked for more work or memory than a conversation needs."""


class Budget:
    """What one rendering may still spend."""

    def __init__(self, characters: int) -> None:
        self.turns = MAX_TURNS + characters
        self.items = MAX_ITEMS + characters
        self.limit = MAX_CHARACTERS + GROWTH * characters
        self.output = self.limit
        self._until = time.thread_time() + MAX_SECONDS
        self._payments = 0

    def _look(self) -> None:
        self._payments += 1
        if self._payments % LOOKS == 0 and time.thread_time() > self._until:
            raise TemplateBoundError(f"it took more than {MAX_SECONDS:.0f} s")

    def turn(self, constant_characters: int) -> None:
        """Pay for one loop turn or macro call, and for the fixed text in its body."""
        self.turns -= 1
        self._look()
        if self.turns < 0:
            raise TemplateBoundError(f"it ran more than {MAX_TURNS:,} loop turns")
        self.write(constant_characters)

    def write(self, characters: int) -> None:
        """Pay for text written."""
        self.output -= characters
        if self.output < 0:
            raise TemplateBoundError(f"it wrote more than {self.limit:,} characters")

    def counted(self, items: Iterable[Any], constant_characters: int) -> Iterator[Any]:
        """Pay for each turn of a loop."""
        for item in items:
            self.turn(constant_characters)
            yield item

    def measured(self, value: Any) -> Any:
        """Refuse a value that weighs more than a rendering may write; shared parts weigh as often as they stand there."""
        if isinstance(value, str):
            if len(value) > self.limit:
                raise TemplateBoundError(f"it made a text of more than {self.limit:,} characters")
        elif isinstance(value, list | tuple | dict):
            self._weigh(value)
        self._look()
        return value

    def _weigh(self, value: Any) -> None:
        weight, count, stack = 0, 1, [value]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                weight += len(item)
            elif isinstance(item, list | tuple | dict):
                count += len(item)
                if count > self.items:
                    raise TemplateBoundError(f"it made a list or mapping of more than {self.items:,} items")
                stack += item.values() if isinstance(item, dict) else item
            if weight > self.limit:
                raise TemplateBoundError(f"it made a list or mapping that holds more than {self.limit:,} characters")


def characters_of(value: Any) -> int:
    """About how much text a value holds: what a budget is measured by."""
    count, stack = 0, [value]
    while stack:
        item = stack.pop()
        count += 1
        if isinstance(item, str):
            count += len(item)
        elif isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            stack += item
    return count


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks an assistant's tokens for training; here the text just passes."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it as an instance variable)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounds(NodeTransformer):
    """Puts the counting and measuring filters into a template's syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        cost = _constant_characters(node.body)
        self.generic_visit(node)
        if node.recursive:  # the loop object walks deeper iterables by itself, so the body pays
            node.body.insert(0, _payment(cost))
        else:
            node.iter = _filter(node.iter, COUNTED, nodes.Const(cost))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        cost = _constant_characters(node.body)
        self.generic_visit(node)
        node.body.insert(0, _payment(cost))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        cost = _constant_characters(node.body)
        self.generic_visit(node.call)  # its arguments, but not the call itself: the statement needs a bare call
        node.body = [self.visit(item) for item in node.body]
        node.body.insert(0, _payment(cost))
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._measure(node) if node.ctx == "load" else node

    def _measure(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, MEASURED)

    visit_Concat = visit_Filter = visit_Call = visit_Add = visit_Mul = visit_Mod = visit_List = visit_Dict = _measure


def _constant_characters(body: Iterable[nodes.Node]) -> int:
    holder = nodes.Scope(list(body))
    return sum(len(data.data) for data in holder.find_all(nodes.TemplateData))


def _filter(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, list(args), [], None, None, lineno=node.lineno)


def _payment(cost: int) -> nodes.Node:
    """A statement that pays for one turn and writes nothing."""
    return nodes.ExprStmt(nodes.Filter(nodes.Const(None), COUNTED, [nodes.Const(cost)], [], None, None, lineno=1), lineno=1)


class SandboxedTemplates(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, set up as transformers does, with the bounds built in."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, strict: bool = False) -> None:
        """`strict`: a name that stands for nothing is an error instead of an empty text, and so is writing None."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, jinja2.ext.loopcontrols],
            finalize=_written_strictly if strict else _written,
            undefined=jinja2.StrictUndefined if strict else jinja2.Undefined,
        )
        for name in ("center", "indent", "batch", "slice", "wordwrap", "truncate", "round"):
            self.filters[name] = _with_checked_arguments(self.filters[name])
        for name in ("join", "replace"):
            self.filters[name] = _with_checked_growth(name, self.filters[name])
        self.filters["format"] = _checked_format(self.filters["format"])
        self.filters["tojson"] = _tojson
        self.filters[COUNTED] = _counted
        self.filters[MEASURED] = _measured
        self.globals["raise_exception"] = _raise_exception
        self.globals.pop("lipsum", None)  # makes text by number

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Bounds().visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse arithmetic that makes much out of little."""
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**" and not (numbers and abs(right) <= MAX_BITS and abs(left) <= 1 << 16):
            raise TemplateBoundError("it raised to a large power")
        if operator == "*" and numbers:
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
                raise TemplateBoundError("it multiplied large numbers")
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int) and len(many) * times > MAX_CHARACTERS:
                    raise TemplateBoundError("it repeated a text or list very often")
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse string methods (`ljust`, `format`, `replace`, ...) that are asked for a huge result."""
        bound = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format in a function of its own
        text = getattr(bound, "__self__", None)
        if isinstance(text, str):
            method = bound.__name__
            if method in ("format", "format_map"):
                _check_format(text, (*args, *kwargs.values()))
            else:
                _check_arguments((*args, *kwargs.values()))
            if args and method == "join" and not isinstance(args[0], str | list | tuple | dict):
                args = (list(args[0]), *args[1:])  # a generator can be gone through only once
            _check_growth(method, text, args)
        return super().call(context, obj, *args, **kwargs)


@jinja2.pass_context
def _counted(context: Context, value: Any, constant_characters: int) -> Any:
    budget: Budget = context[BUDGET]
    if value is None:
        return budget.turn(constant_characters)
    return budget.counted(value, constant_characters)


@jinja2.pass_context
def _measured(context: Context, value: Any) -> Any:
    budget: Budget = context[BUDGET]
    return budget.measured(value)


@jinja2.pass_context
def _written(context: Context, value: Any) -> Any:
    """Jinja's `finalize`: everything that a template writes passes here."""
    text = value if isinstance(value, str) else str(value)
    budget: Budget = context[BUDGET]
    budget.write(len(text))
    return text


@jinja2.pass_context
def _written_strictly(context: Context, value: Any) -> Any:
    if value is None:
        raise jinja2.UndefinedError("it writes a value that is null; `{{ column or '' }}` writes nothing instead")
    return _written(context, value)


def _with_checked_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose arguments may make a huge result out of nothing."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_arguments((*args, *kwargs.values()))
        for text in (*args[1:], *kwargs.values()):
            if isinstance(text, str) and len(text) > MAX_ARGUMENT:
                raise TemplateBoundError("it padded a text with a very long one")
        return original(*args, **kwargs)

    return _keeping_mark(original, checked)


def _checked_format(original: Callable[..., Any]) -> Callable[..., Any]:
    def checked(text: Any, *args: Any, **kwargs: Any) -> Any:
        _check_format(str(text), (*args, *kwargs.values()))
        return original(text, *args, **kwargs)

    return _keeping_mark(original, checked)


def _with_checked_growth(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """`join` and `replace` as filters; their first argument is what Jinja passes to filters that ask for it."""

    def checked(eval_ctx: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "join":
            value = list(value)
            separator = args[0] if args else kwargs.get("d", "")
            _check_growth("join", str(separator), (value,))
        else:
            _check_growth("replace", str(value), (*args, *kwargs.values()))
        return original(eval_ctx, value, *args, **kwargs)

    return _keeping_mark(original, checked)


def _keeping_mark(original: Callable[..., Any], wrapped: Callable[..., Any]) -> Callable[..., Any]:
    """Carry over what tells Jinja to pass the environment or evaluation context first."""
    wrapped.__dict__.update(original.__dict__)
    return wrapped


def _check_arguments(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise TemplateBoundError("it asked for a size of more than a million")


def _check_format(text: str, values: Iterable[Any]) -> None:
    """Refuse huge widths, in the format or given as values, and formats that repeat long values often."""
    values = tuple(values)
    _check_arguments(values)
    specs = [value for value in values if isinstance(value, str)] if NESTED.search(text) else []  # `{:{}}` takes its width from a value
    if any(WIDTHS.search(spec) for spec in (text, *specs)):
        raise TemplateBoundError("it asked for a format of a huge width")
    longest = max((len(value) for value in values if isinstance(value, str)), default=0)
    if (text.count("%") + text.count("{")) * longest > 4 * MAX_CHARACTERS:
        raise TemplateBoundError("it formatted a long text many times")


def _check_growth(method: str, text: str, args: tuple[Any, ...]) -> None:
    size = 0
    if method == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        size = text.count(args[0]) * len(args[1])
    elif method == "join" and args:
        size = len(text) * len(args[0])
    elif method == "expandtabs":
        size = text.count("\t") * (args[0] if args and isinstance(args[0], int) else 8)
    elif method == "translate":
        raise TemplateBoundError("it translated a text character by character")
    if size > 4 * MAX_CHARACTERS:
        raise TemplateBoundError(f"its {method} made a very long text")


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """JSON as it should read in a prompt: Jinja's own filter escapes for HTML."""
    _check_arguments((indent,))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
