"""Compiling: what is refused and in which words, that it is bounded, that it is done once and ahead."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchinfer.core.structure import Structure, StructureKind
from batchinfer.core.vocabulary import Vocabulary
from batchinfer.errors import InputError
from batchinfer.runtime.grammar import GrammarCompiler
from batchinfer.runtime.grammar_shelf import AHEAD, GrammarShelf
from batchinfer.runtime.masking import MaskEdit, Masks, only_tokens

EOS = 256
BYTES = Vocabulary([*(bytes([i]) for i in range(256)), b"<eos>"], frozenset({EOS}), (EOS,))
SCHEMAS = Path(__file__).with_name("function_schemas.jsonl")


def compiler(vocabulary: Vocabulary = BYTES) -> GrammarCompiler:
    return GrammarCompiler(vocabulary, lambda text: list(text.encode()))


COMPILER = compiler()


def unpacked(bits: np.ndarray, width: int) -> np.ndarray:
    return np.unpackbits(bits.view(np.uint8), axis=1, count=width, bitorder="little").view(bool)


def schema(value: Any) -> Structure:
    return Structure(StructureKind.JSON, json.dumps(value))


def accepts(structure: Structure, text: str) -> bool:
    matcher = COMPILER.compile(structure).start()
    raw = list(text.encode())
    return bool(matcher.try_consume_tokens(raw) == len(raw) and matcher.is_accepting())


def random_text(structure: Structure, seed: int, most: int) -> tuple[str, bool]:
    """A text that the masks allow, and whether it is complete."""
    rng, matcher, out = np.random.default_rng(seed), COMPILER.compile(structure).start(), bytearray()
    while len(out) < most and not matcher.is_stopped():
        mask = unpacked(np.frombuffer(matcher.compute_bitmask(), np.int32)[None].copy(), BYTES.size)[0]
        if matcher.is_error():
            return out.decode("utf-8", "replace"), False
        token = int(rng.choice(np.flatnonzero(mask)))
        if not matcher.consume_token(token):  # a limit of the library: the row fails with its words
            assert matcher.is_error()
            return out.decode("utf-8", "replace"), False
        if token == EOS:
            break
        out.append(token)
    return out.decode("utf-8", "replace"), matcher.is_stopped() and not matcher.is_error()


@pytest.mark.parametrize(
    "value, words",
    [
        ({"not": {"type": "integer"}}, "not supported: not"),
        ({"if": {}, "then": {"minimum": 3}}, "not supported: if, then"),
        ({"type": "array", "uniqueItems": True}, "not supported: uniqueItems"),
        ({"type": "integr"}, "integr"),
        ({"type": "string", "pattern": "([a-z"}, "unclosed"),
        ({"type": "string", "const": 5}, "incompatible types"),
        ({"enum": []}, "empty"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "greater than maximum"),
        ({"$ref": "#/$defs/nope"}, "does not exist"),
        ({"$ref": "https://example.com/schema.json"}, "does not fetch"),
        ({"$ref": "file:///etc/passwd"}, "does not fetch"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}, "nothing can satisfy it"),
    ],
)
def test_schemas_that_cannot_be_used_are_refused_with_the_reason(value: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        COMPILER.compile(schema(value))
    assert caught.value.code in ("unsupported_schema", "invalid_schema")
    assert len(str(caught.value)) < 400


def test_other_languages_and_their_mistakes() -> None:
    assert accepts(Structure(StructureKind.REGEX, r"\d{3}/[ab]+"), "012/ab")
    assert not accepts(Structure(StructureKind.REGEX, r"\d"), "٣"), "digits are ASCII"
    assert accepts(Structure(StructureKind.GRAMMAR, 'start: "x" /[0-9]+/'), "x12")
    assert accepts(Structure(StructureKind.GRAMMAR, 'root ::= "x" [0-9]+'), "x12"), "EBNF is understood, too"
    odd = ['a"b', "back\\slash", "new\nline", "日本", "\x00", "/x/", "a, b"]
    choice = Structure(StructureKind.CHOICE, json.dumps(odd, ensure_ascii=False))
    assert all(accepts(choice, text) for text in odd)
    assert not accepts(choice, "a")
    for wrong in (
        Structure(StructureKind.REGEX, "(?=x)x"),
        Structure(StructureKind.GRAMMAR, "start: nope"),
        Structure(StructureKind.REGEX, "("),
    ):
        with pytest.raises(InputError):
            COMPILER.compile(wrong)


def test_ten_thousand_choices_compile() -> None:
    texts = [f"choice number {i}" for i in range(10_000)]
    assert accepts(Structure(StructureKind.CHOICE, json.dumps(texts)), texts[-1])


@pytest.mark.parametrize(
    "value",
    [
        {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(24)], "type": "object"},
        {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(10, 25)]},
        {
            "$ref": "#/$defs/a0",
            "$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(30)} | {"a30": {"type": "integer"}},
        },
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
        {"type": "string", "maxLength": 10**9, "pattern": "^a*$"},
        {"type": "integer", "multipleOf": 10**9 + 7},
    ],
)
def test_bombs_are_refused_or_compiled_but_end(value: Any) -> None:
    try:
        compiled = COMPILER.compile(schema(value))
    except InputError:
        return
    matcher = compiled.start()
    matcher.compute_bitmask()
    assert matcher.is_error() or not matcher.is_stopped()


def test_whitespace_is_one_space_after_commas_and_colons_and_nowhere_else() -> None:
    structure = schema({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}, "required": ["a"]})
    assert accepts(structure, '{"a": 1, "b": [1, 2]}')
    for loose in ('{ "a": 1}', '{"a":1}', '{"a":  1}', '{"a": 1 }', '{"a": 1\n}', ' {"a": 1}'):
        assert not accepts(structure, loose)
    assert not accepts(schema({"x-guidance": {"whitespace_flexible": True}, "type": "array"}), "[ ]")


def test_a_structure_is_compiled_once_and_the_least_used_goes_first() -> None:
    shelf = GrammarShelf(COMPILER, most=2)
    first, second, third = (schema({"const": value}) for value in range(3))
    assert shelf.grammar(first) is shelf.grammar(first)
    kept = shelf.grammar(first)
    shelf.grammar(second)
    shelf.grammar(first)
    shelf.grammar(third)
    assert shelf.grammar(first) is kept
    assert shelf.num_compiled == 3
    shelf.grammar(second)
    assert shelf.num_compiled == 4
    for _ in range(2):
        with pytest.raises(InputError, match="integr"):
            shelf.require(schema({"type": "integr"}))
    assert shelf.num_compiled == 5, "what failed is remembered, too"


def test_reading_ahead_keeps_the_order_and_asks_for_no_more_than_it_needs() -> None:
    shelf = GrammarShelf(COMPILER)
    pulled: list[int] = []

    def items() -> Any:
        for i in range(200):
            pulled.append(i)
            yield i

    plain = shelf.ahead(items(), lambda item: None)
    assert [next(plain) for _ in range(3)] == [0, 1, 2]
    assert len(pulled) == 3, "items without a structure are read one at a time"
    pulled.clear()
    mixed = shelf.ahead(items(), lambda item: schema({"const": item}) if item % 3 else None)
    given_out = [item for item in mixed if item is not None]
    assert given_out == list(range(200))
    waits = shelf.ahead(iter([None, 5, None]), lambda item: schema({"const": 5}))
    assert [item for item in waits if item is not None] == [5]
    assert AHEAD > 1


def test_finished_texts_are_judged_by_a_second_reader() -> None:
    shelf = GrammarShelf(COMPILER)
    structure = schema({"oneOf": [{"type": "integer"}, {"type": "number", "maximum": 5}]})
    assert shelf.fault(structure, "7") is None
    fault = shelf.fault(structure, "3")
    assert fault is not None
    assert fault.code == "structured_output_invalid", "oneOf is followed as anyOf; both fit here"
    assert shelf.fault(structure, '{"a": ') is not None
    assert shelf.fault(Structure(StructureKind.CHOICE, '["a"]'), "b") is not None
    evil = schema({"type": "object", "patternProperties": {"^(a+)+$": {"type": "integer"}}, "additionalProperties": {"type": "integer"}})
    assert shelf.fault(evil, '{"' + "a" * 64 + '!": 1}') is None, "a pattern that takes Python's re for ever"


def test_real_function_schemas_compile_and_random_texts_are_valid() -> None:
    lines = SCHEMAS.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 60
    finished = 0
    for seed, line in enumerate(lines):
        structure = schema(json.loads(line)["parameters"])
        text, complete = random_text(structure, seed, 400)
        if complete:
            finished += 1
            assert COMPILER.compile(structure).judge(text) is None, text
    assert finished >= 5


def test_only_tokens_are_found_in_masks() -> None:
    rng = np.random.default_rng(0)
    masks = np.zeros((200, 96), bool)
    for row in masks:
        row[rng.integers(0, 96, int(rng.integers(0, 3)))] = True
    bits = np.packbits(masks, axis=1, bitorder="little").view(np.int32)
    one, token_ids = only_tokens(bits)
    assert (one == (masks.sum(1) == 1)).all()
    assert (token_ids[one] == masks.argmax(1)[one]).all()
    assert (unpacked(bits, 96) == masks).all()


def test_masks_change_the_logits_of_their_rows_alone_slice_by_slice() -> None:
    rng = np.random.default_rng(1)
    masks = rng.random((5, 96)) < 0.4
    masks[2] = np.arange(96) == 70
    bits = np.packbits(masks, axis=1, bitorder="little").view(np.int32)
    rows = np.array([0, 2, 3, 6, 7])
    for chosen, height in ((rows, 9), (np.arange(5), 5)):
        logits = torch.randn(height, 100)
        edit, changed = MaskEdit(chosen, Masks.of(bits)), logits.clone()
        for first in (0, 40, 80):
            edit.change(first, changed[:, first : first + 40])
        wanted = logits.clone()
        wanted[torch.from_numpy(chosen), :96] = torch.where(torch.from_numpy(masks), logits[chosen, :96], -torch.inf)
        wanted[chosen[2], 70] = 0.0
        assert torch.equal(changed, wanted)


def _schemas() -> st.SearchStrategy[Any]:
    scalar = st.one_of(st.none(), st.booleans(), st.integers(-1000, 1000), st.floats(allow_nan=False), st.text(max_size=6))
    leaf = st.one_of(
        st.just({}),
        st.builds(lambda v: {"enum": v}, st.lists(scalar, max_size=4)),
        st.builds(
            lambda a, b: {"type": "integer", "minimum": a, "maximum": b}, st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12)
        ),
        st.builds(lambda a, b: {"type": "string", "minLength": a, "maxLength": b}, st.integers(-2, 9), st.integers(0, 9)),
        st.builds(lambda p: {"type": "string", "pattern": p}, st.text("ab(|)*+?[]^$.\\d{}1,", max_size=12)),
        st.builds(lambda t: {"type": t}, st.sampled_from(["null", "boolean", "number", "string", "object", "array", "nonsense", 5])),
        st.dictionaries(st.sampled_from(["type", "items", "minimum", "required", "$ref", "format", "not", "anyOf"]), scalar, max_size=3),
    )

    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        names = st.text('abc"\\é', min_size=0, max_size=3)
        return st.one_of(
            st.builds(
                lambda p, r: {"type": "object", "properties": p, "required": r},
                st.dictionaries(names, inner, max_size=3),
                st.lists(names, max_size=2),
            ),
            st.builds(lambda i, n: {"type": "array", "items": i, "minItems": n, "maxItems": n + 2}, inner, st.integers(0, 3)),
            st.builds(lambda k, v: {k: v}, st.sampled_from(["anyOf", "allOf", "oneOf"]), st.lists(inner, max_size=3)),
            st.just({"$ref": "#"}),
        )

    return st.recursive(leaf, grow, max_leaves=8)


@given(_schemas(), st.integers(0, 100))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_any_schema_gives_a_result_or_an_error_of_its_row(value: Any, seed: int) -> None:
    try:
        text, complete = random_text(schema(value), seed, 60)
    except InputError:
        return
    if complete:
        json.loads(text)
        assert not re.search(r"\s{2,}", re.sub(r'"(?:[^"\\]|\\.)*"', "", text))
        COMPILER.compile(schema(value)).judge(text)


@given(st.text(max_size=30), st.sampled_from([StructureKind.REGEX, StructureKind.GRAMMAR]))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_any_regex_or_grammar_gives_a_result_or_an_error_of_its_row(text: str, kind: StructureKind) -> None:
    try:
        random_text(Structure(kind, text or "x"), 0, 30)
    except InputError:
        return
