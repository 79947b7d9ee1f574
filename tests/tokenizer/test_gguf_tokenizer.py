"""Tokenizers built from GGUF metadata: token types, special ids, how words are cut, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from batchinfer.errors import ModelError
from batchinfer.io.gguf_tokenizer import GPT2, PRE_TOKENIZERS
from batchinfer.io.tokenizer import Tokenizer, load_tokenizer
from batchinfer.weights.source import ModelFiles
from tests.oracle.tiny_models import CHAT_TEMPLATE, MERGES, build_tokenizer
from tests.tokenizer.gguf_vocabulary import CONTROL, NORMAL, UNUSED, USER_DEFINED, write_vocabulary
from tests.tokenizer.texts import TEXTS


def of_gguf(path: Path) -> Tokenizer:
    return load_tokenizer(ModelFiles("m", "gguf", path))


BYTES = list(json.loads(build_tokenizer().to_str())["model"]["vocab"])[:256]


def bpe_tokens(extra: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(token, NORMAL) for token in [*BYTES, *(merge.replace(" ", "") for merge in MERGES)]] + extra


def test_token_types_of_byte_level_files(tmp_path: Path) -> None:
    extra = [("<|end|>", CONTROL), ("<tool>", USER_DEFINED), ("<unused>", UNUSED), ("[PAD1]", UNUSED), ("[PAD2]", UNUSED)]
    tokens = bpe_tokens(extra)
    path = write_vocabulary(
        tmp_path / "m.gguf", "gpt2", tokens, merges=MERGES, pre="gpt-2", eos_token_id=len(BYTES) + len(MERGES), add_eos_token=True
    )
    ours = of_gguf(path)
    end = len(tokens) - 5
    assert ours.encode("a<tool><|end|>", False)[1:] == [end + 1, end]
    assert ours.encode("a", True) == [*ours.encode("a", False), end]
    assert ours.vocabulary.special_ids == {end}
    assert ours.vocabulary.size == len(tokens) - 2  # padding rows are no tokens
    assert ours.decode([end, end + 1]) == "<tool>"
    assert ours.decode([end, end + 1], skip_special_tokens=False) == "<|end|><tool>"


def test_stated_and_templated_end_tokens_are_eos(tmp_path: Path) -> None:
    extra = [("<|end_of_text|>", CONTROL), ("<|eot_id|>", CONTROL), ("<|eom_id|>", CONTROL), ("<|im_end|>", CONTROL), ("<|end|>", NORMAL)]
    first = len(bpe_tokens([]))
    keys: dict[str, Any] = {"merges": MERGES, "pre": "gpt-2", "eos_token_id": first, "eom_token_id": first + 2}
    template = CHAT_TEMPLATE + "<|end|>"
    assert of_gguf(write_vocabulary(tmp_path / "a.gguf", "gpt2", bpe_tokens(extra), **keys)).vocabulary.eos_ids == (first, first + 2)
    path = write_vocabulary(tmp_path / "b.gguf", "gpt2", bpe_tokens(extra), chat_template=template, eot_token_id=first + 1, **keys)
    assert of_gguf(path).vocabulary.eos_ids == (first, first + 1, first + 2, first + 3)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_loads_and_loses_nothing(tmp_path: Path, pre: str) -> None:
    tokens = bpe_tokens([("<s>", CONTROL)])
    ours = of_gguf(write_vocabulary(tmp_path / "m.gguf", "gpt2", tokens, merges=MERGES, pre=pre, bos_token_id=len(tokens) - 1))
    for text in TEXTS:
        if "e\u0301" not in text or not PRE_TOKENIZERS[pre].normalise:
            assert ours.decode(ours.encode(text, False), skip_special_tokens=False) == text
    assert (ours.encode("a", True)[0] == len(tokens) - 1) == PRE_TOKENIZERS[pre].add_bos


def words(pre: str, text: str) -> list[str]:
    splits = [pre_tokenizers.Split(tokenizers.Regex(e), "isolated") for e in PRE_TOKENIZERS[pre].expressions]
    return [word for word, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    "pre,text,expected",
    [
        ("gpt-2", "I've 1234 x", ["I", "'ve", " 1234", " x"]),
        ("smollm", "I've 12  x", ["I", "'ve", " ", "1", "2", " ", " x"]),
        ("llama-bpe", "I'VE 1234!\n\n x", ["I", "'VE", " ", "123", "4", "!\n\n", " x"]),
        ("qwen2", "a 12\n b", ["a", " ", "1", "2", "\n", " b"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("deepseek-coder", "int x=12;\n", ["int", " x", "=", "1", "2", ";", "\n"]),
    ],
)
def test_how_text_is_cut(pre: str, text: str, expected: list[str]) -> None:
    assert words(pre, text) == expected


def test_the_gpt2_rule_is_the_librarys_own() -> None:
    own = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(tokenizers.Regex(GPT2), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    library = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    for text in TEXTS:
        assert own.pre_tokenize_str(text) == library.pre_tokenize_str(text)


@pytest.mark.parametrize(
    "model,keys,named",
    [
        ("gpt2", {"merges": MERGES, "pre": "chameleon"}, "pre-tokenizer 'chameleon' is not supported"),
        ("bert", {}, "tokenizer model 'bert' is not supported"),
        ("t5", {}, "tokenizer model 't5'"),
        ("gpt2", {"pre": "gpt-2"}, "no list tokenizer.ggml.merges"),
        ("gpt2", {"pre": "gpt-2", "merges": ["ab"]}, "merge 'ab' is not a pair"),
        ("gpt2", {"pre": "gpt-2", "merges": ["zz zz"]}, "do not fit together"),
        ("llama", {}, "scores does not match"),
        ("llama", {"scores": [0.5]}, "scores does not match"),
        ("gpt2", {"pre": "gpt-2", "merges": MERGES, "bos_token_id": 99999, "add_bos_token": True}, "bos_token_id is 99999"),
    ],
)
def test_vocabularies_that_cannot_be_used_say_why(tmp_path: Path, model: str, keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        of_gguf(write_vocabulary(tmp_path / "m.gguf", model, bpe_tokens([]), **keys))


def test_a_token_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "m.gguf", "gpt2", bpe_tokens([("he", NORMAL)]), merges=MERGES, pre="gpt-2")
    with pytest.raises(ModelError, match="'he' stands twice"):
        of_gguf(path)
