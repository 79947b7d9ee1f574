"""From a structure to what says which tokens may come next: llguidance, bound here and nowhere else.

It derives masks lazily from regex derivatives and an Earley parser, so that compiling costs about a millisecond and no
schema has to be walked through in advance; its own limits (`LIMITS`) are counts of work, not seconds, so that what is
too complex is so on every machine.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from batchinfer.core.structure import Structure, StructureKind, choices_of
from batchinfer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llguidance import LLMatcher, LLTokenizer

    from batchinfer.core.vocabulary import Vocabulary
    from batchinfer.runtime.call_grammar import CallsCheck
    from batchinfer.runtime.schema_check import SchemaCheck

# As `json.dumps` writes: one space after a comma and a colon, and none anywhere else, so that no answer runs off in blanks.
JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,  # as anyOf; what breaks the difference is found when the finished text is checked
    "lenient": False,  # a keyword that is not enforced is refused by name
}
LIMITS = {"verbose_errors": False, "max_items_in_row": 16_384}
MOST_WORDS = 300  # characters of the library's explanation
MOST_JOINED = 12  # patterns and formats of a schema that joins them: the library's time doubles with each


@dataclass(frozen=True, slots=True, eq=False)
class GrammarTokenizer:
    """A vocabulary as llguidance wants it: bytes of every id, and the model's own way of cutting text into tokens."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    encode: Callable[[str], Sequence[int]]
    bos_token_id: int | None = None
    is_tokenizer_wrapper: bool = True

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids of a text; the library falls back on the longest tokens where they do not spell it."""
        raw = text.encode() if isinstance(text, str) else text
        ids = list(self.encode(raw.decode("utf-8", "replace")))
        if b"".join([self.tokens[i] for i in ids]) == raw:
            return ids
        return self._longest(raw)  # a tokenizer that puts a space before every text

    def _longest(self, raw: bytes) -> list[int]:
        by_spelling, longest = self._spellings
        ids, at = [], 0
        while at < len(raw):
            size = next(n for n in range(min(longest, len(raw) - at), 0, -1) if raw[at : at + n] in by_spelling or n == 1)
            token = by_spelling.get(raw[at : at + size])
            if token is None:
                break
            ids.append(token)
            at += size
        return ids

    @property
    def _spellings(self) -> tuple[dict[bytes, int], int]:
        special = set(self.special_token_ids)
        table = {token: i for i, token in reversed(list(enumerate(self.tokens))) if token and i not in special}
        return table, max(map(len, table), default=1)


class Grammar:
    """A compiled structure: makes a matcher for every row, and checks finished texts."""

    def __init__(self, structure: Structure, matcher: LLMatcher) -> None:
        self.structure = structure
        self._matcher = matcher

    def start(self) -> LLMatcher:
        """A matcher at the beginning."""
        return self._matcher.deep_copy()

    def judge(self, text: str) -> str | None:
        """What is wrong with a finished text, None where it is as it was asked for."""
        kind = self.structure.kind
        if kind is StructureKind.JSON:
            return self._schema_check.fault(text)
        if kind is StructureKind.CHOICE:
            return None if text in self._choices else "it is none of the choices"
        if kind is StructureKind.CALLS:
            return self._calls_check.fault(text)
        return None  # the matcher that followed every token is the only reader of regexes and grammars that is sure to end

    @cached_property
    def _choices(self) -> frozenset[str]:
        return frozenset(choices_of(self.structure))

    @cached_property
    def _calls_check(self) -> CallsCheck:
        from batchinfer.runtime.call_grammar import CallsCheck

        return CallsCheck(json.loads(self.structure.text))

    @cached_property
    def _schema_check(self) -> SchemaCheck:
        from batchinfer.runtime.schema_check import SchemaCheck

        return SchemaCheck(json.loads(self.structure.text))


class GrammarCompiler:
    """Compiles structures for one vocabulary; the library and its view of the vocabulary are made at first use."""

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], Sequence[int]]) -> None:
        self._vocabulary = vocabulary
        self._encode = encode
        self._lock = threading.Lock()
        self._made: LLTokenizer | None = None

    def compile(self, structure: Structure) -> Grammar:
        """The structure, compiled as far as its first mask. Raises `InputError` where that cannot be done."""
        from llguidance import LLMatcher, LLParserLimits

        if structure.kind in (StructureKind.JSON, StructureKind.CALLS) and _num_joined(json.loads(structure.text)) > MOST_JOINED:
            raise InputError(f"{structure.title} joins more than {MOST_JOINED} patterns and formats by allOf or $ref", "invalid_schema")
        tokenizer = self._tokenizer()
        try:
            matcher = LLMatcher(tokenizer, _source(structure), log_level=0, limits=LLParserLimits(**LIMITS))  # type: ignore[arg-type]
            if not matcher.is_error():
                matcher.compute_bitmask()  # what nothing satisfies shows only here; and every row's first step is done
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library's own panics are no Exception
            raise _refused(structure, str(error)) from None
        if matcher.is_error():
            raise _refused(structure, matcher.get_error())
        return Grammar(structure, matcher)

    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._lock:
            if self._made is None:
                vocabulary = self._vocabulary
                if not vocabulary.eos_ids:
                    raise InputError("structured output needs a model with an end token; this one names none", "unsupported_parameter")
                special = sorted(i for i in vocabulary.special_ids if i < vocabulary.size)
                wrapped: Any = GrammarTokenizer(list(vocabulary.token_bytes), special, vocabulary.eos_ids[0], self._encode)
                self._made = LLTokenizer(
                    wrapped, n_vocab=vocabulary.size, eos_token=list(vocabulary.eos_ids), slices=LLTokenizer.json_slices()
                )
            return self._made


def _source(structure: Structure) -> str:
    from llguidance import LLMatcher, regex_to_lark
    from llguidance.gbnf_to_lark import any_to_lark

    match structure.kind:
        case StructureKind.JSON:
            return LLMatcher.grammar_from_json_schema(structure.text, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
        case StructureKind.REGEX:  # \d and \w are ASCII, as in JSON schemas
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(structure.text, 'dw')}/")
        case StructureKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(any_to_lark(structure.text))
        case StructureKind.CALLS:
            from batchinfer.runtime.call_grammar import call_grammar

            return LLMatcher.grammar_from_lark(call_grammar(json.loads(structure.text), JSON_OPTIONS))
    # One terminal of all choices: the lexer reads thousands at once, where rules would be followed one by one.
    return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices_of(structure))))


def _refused(structure: Structure, words: str) -> InputError:
    words = " ".join(words.split("<non-verbose/>")[0].split())
    if words.startswith("Unimplemented keys:"):
        keys = ", ".join(json.loads(words.removeprefix("Unimplemented keys:")))
        return InputError(f"{structure.title} uses what is not supported: {keys}; leave it out", "unsupported_schema")
    if words.startswith("NoExtension"):
        words = "nothing can satisfy it"
    return InputError(f"{structure.title} cannot be used: {words[:MOST_WORDS]}", "invalid_schema")


def _num_joined(schema: Any) -> int:
    """Patterns and formats of a schema in which one text may have to obey several of them; 0 for any other schema."""
    count, joins, level = 0, False, [schema]
    while level:
        for item in level:
            if isinstance(item, dict):
                strict = sum(isinstance(item.get(name), str) for name in ("pattern", "format"))
                count += strict
                joins = joins or "allOf" in item or ("$ref" in item and strict > 0)
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item) if isinstance(inner, dict | list)]
    return count if joins else 0
