"""Tokenizers: ids as the model's own tokenizer gives them, and text as its own decoder gives it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from batchinfer.errors import InputError, ModelError, UnsupportedModel
from batchinfer.io.shrinking import bytes_per_token
from batchinfer.io.token_bytes import byte_alphabet, token_bytes
from batchinfer.io.tokenizer import Tokenizer, load_tokenizer
from batchinfer.weights.source import ModelFiles, resolve_model
from tests.oracle.tiny_models import IM_END_ID, build_tokenizer, write_gguf, write_tiny
from tests.tokenizer.gguf_vocabulary import joined_by_score, sentencepiece_vocabulary, write_vocabulary
from tests.tokenizer.texts import TEXTS


def of_gguf(path: Path) -> Tokenizer:
    return load_tokenizer(ModelFiles("m", "gguf", path))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder / "m", "llama2", add_bos=True)
    write_gguf(folder / "m", folder / "m.gguf")
    return folder


def test_folder_and_gguf_encode_as_transformers_does(tiny: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(tiny / "m")
    for path in (tiny / "m", tiny / "m.gguf"):
        ours = load_tokenizer(resolve_model(str(path)))
        for special in (True, False):
            expected = [theirs.encode(text, add_special_tokens=special) for text in TEXTS]
            assert ours.encode_batch(TEXTS, special) == expected
        assert ours.vocabulary.size == len(theirs)
        assert ours.vocabulary.special_ids == set(theirs.all_special_ids) | {IM_END_ID - 1}
        assert ours.has_chat_template
        messages = [{"role": "user", "content": "Hi"}]
        assert ours.render_chat(messages) == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_eos_is_the_union_of_tokenizer_config_and_generation_config(tiny: Path) -> None:
    assert load_tokenizer(resolve_model(str(tiny / "m"))).vocabulary.eos_ids == (IM_END_ID, IM_END_ID - 2)
    assert of_gguf(tiny / "m.gguf").vocabulary.eos_ids == (IM_END_ID,)


@pytest.mark.model
def test_smollm2_encodes_as_its_own_tokenizer_does() -> None:
    files = resolve_model("smollm2-135m")
    if files.kind != "gguf":
        pytest.skip("the default model came from the hub")
    ours = load_tokenizer(files)
    theirs = AutoTokenizer.from_pretrained(files.path.parent, gguf_file=files.path.name)
    digits_apart = [text for text in TEXTS if "²" not in text]  # transformers forgets the file's own rule for odd digits
    for text in digits_apart:
        assert ours.encode(text, True) == theirs.encode(text), text
    assert ours.encode("Hello", True) == [19556]
    assert ours.vocabulary.eos_ids == (2,)
    messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    prompt = ours.render_chat(messages)
    assert prompt == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert len(ours.encode(prompt, False)) == 42
    check_decoding(ours, [ours.encode(text, True) for text in TEXTS])


def check_decoding(ours: Tokenizer, sequences: list[list[int]]) -> None:
    for ids in sequences:
        for skip in (True, False):
            assert ours.decode(ids, skip) == ours.backend.decode(ids, skip_special_tokens=skip), ids


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, IM_END_ID), max_size=30))
def test_byte_level_decoding_equals_the_librarys_for_any_ids(tiny: Path, ids: list[int]) -> None:
    check_decoding(load_tokenizer(resolve_model(str(tiny / "m"))), [ids])


@given(token=st.one_of(st.text(max_size=8), st.text(alphabet=[*byte_alphabet(), " ", "\xad", "\u0144", "\ud800"], max_size=8)))
def test_letters_of_the_byte_alphabet_are_bytes_and_any_other_token_is_its_text(token: str) -> None:
    alphabet = byte_alphabet()
    known = all(letter in alphabet for letter in token)
    expected = bytes(alphabet[letter] for letter in token) if known else token.encode("utf-8", "replace")
    assert token_bytes([token, None], decoders.ByteLevel(), "here").table == [expected, b""]


PIECES = [
    "\u2581t",
    "he",
    "\u2581the",
    "in",
    "re",
    "\u2581a",
    "nd",
    "\u2581and",
    "ing",
    "\u2581\u2581",
    "th",
    "the",
    "日本",
    "ab",
    "ba",
    "aba",
    "\u2581I",
]


@pytest.fixture(scope="module")
def piece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokens, scores = sentencepiece_vocabulary(PIECES)
    return write_vocabulary(tmp_path_factory.mktemp("spm") / "m.gguf", "llama", tokens, scores=scores, bos_token_id=1, eos_token_id=2)


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="the andingIabré日本x\n", max_size=40))
def test_sentencepiece_style_joins_by_score(piece_file: Path, text: str) -> None:
    ours = of_gguf(piece_file)
    tokens, scores = sentencepiece_vocabulary(PIECES)
    expected = joined_by_score("\u2581" + text.replace(" ", "\u2581"), tokens, scores) if text else []
    assert ours.encode(text, False) == expected
    assert ours.encode(text, True) == [1, *expected]
    assert ours.decode(expected) == text
    check_decoding(ours, [expected])


def test_sentencepiece_style_settings(tmp_path: Path, piece_file: Path) -> None:
    tokens, scores = sentencepiece_vocabulary(PIECES)
    assert of_gguf(piece_file).encode("the", True) == [1, *of_gguf(piece_file).encode("the", False)]
    other = write_vocabulary(
        tmp_path / "m.gguf",
        "llama",
        tokens,
        scores=scores,
        bos_token_id=1,
        eos_token_id=2,
        add_bos_token=False,
        add_eos_token=True,
        add_space_prefix=False,
    )
    ours = of_gguf(other)
    names = [token for token, _ in tokens]
    assert ours.encode("the", True) == [names.index("the"), 2]
    assert ours.decode(ours.encode(" the", False)) == " the"
    assert ours.vocabulary.special_ids == {0, 1, 2}
    assert ours.encode("<s>the</s>", False) == [1, names.index("the"), 2]


def llama_like(strip: bool = True) -> tokenizers.Tokenizer:
    """What a Llama 2 tokenizer.json holds."""
    tokens, _ = sentencepiece_vocabulary(PIECES)
    vocabulary = {token: index for index, (token, _) in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("\u2581", "t"), ("h", "e")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def folder_with(folder: Path, tokenizer: tokenizers.Tokenizer | None, **config: Any) -> ModelFiles:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    return ModelFiles("m", "folder", folder)


@pytest.mark.parametrize("strip", [True, False])
def test_llama2_style_decoding_equals_the_librarys(tmp_path: Path, strip: bool) -> None:
    ours = load_tokenizer(folder_with(tmp_path, llama_like(strip)))
    assert ours.vocabulary.strip_leading_space == strip
    check_decoding(ours, [ours.encode(text, special) for text in TEXTS for special in (True, False)])
    assert ours.decode(ours.encode("日本語 x", True)) == ("日本語 x" if strip else " 日本語 x")


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 280), st.integers(3, 258)), max_size=20))
def test_sentencepiece_decoding_equals_the_librarys_for_any_ids(piece_file: Path, ids: list[int]) -> None:
    """Also where bytes are no UTF-8, as in a text that was cut inside a character."""
    check_decoding(of_gguf(piece_file), [ids])


def test_metaspace_decoding_equals_the_librarys(tmp_path: Path) -> None:
    tokens, _ = sentencepiece_vocabulary(PIECES)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={t: i for i, (t, _) in enumerate(tokens)}, merges=[("\u2581", "t")], unk_token="<unk>", byte_fallback=False)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    ours = load_tokenizer(folder_with(tmp_path, tokenizer))
    check_decoding(ours, [ours.encode(text, True) for text in ("the and ing", "a t", "I ab")])


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.BPEDecoder(), decoders.CTC()])
def test_other_decoders_are_refused_by_name(tmp_path: Path, decoder: Any) -> None:
    tokenizer = build_tokenizer()
    if decoder is not None:
        tokenizer.decoder = decoder
    else:
        saved = json.loads(tokenizer.to_str()) | {"decoder": None}
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(saved))
    with pytest.raises(UnsupportedModel, match=type(decoder).__name__ if decoder else "decoder none"):
        load_tokenizer(folder_with(tmp_path, tokenizer))


def test_padding_and_truncation_of_the_file_do_not_touch_prompts(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    ours = load_tokenizer(folder_with(tmp_path, tokenizer))
    assert list(map(len, ours.encode_batch(["a", "abcdefgh"], True))) == [1, 8]


def test_tokens_without_an_embedding_row_are_no_part_of_the_vocabulary(tmp_path: Path) -> None:
    files = folder_with(tmp_path, build_tokenizer())
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": IM_END_ID - 1, "eos_token_id": [5, IM_END_ID]}))
    vocabulary = load_tokenizer(files).vocabulary
    assert vocabulary.size == IM_END_ID - 1
    assert vocabulary.special_ids == {IM_END_ID - 2}
    assert vocabulary.eos_ids == (5,)


def test_special_tokens_in_every_spelling_reach_the_template(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<|endoftext|>", "lstrip": False},
        "eos_token": "<|im_end|>",
        "pad_token": None,
        "chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}",
    }
    ours = load_tokenizer(folder_with(tmp_path, build_tokenizer(), **config))
    assert ours.render_chat([{"role": "user", "content": "a"}]) == "<|endoftext|><|im_end|>"
    assert ours.vocabulary.eos_ids == (IM_END_ID,)


def test_messages_in_other_shapes(tiny: Path) -> None:
    ours = load_tokenizer(resolve_model(str(tiny / "m")))
    plain = ours.render_chat([{"role": "user", "content": "one two"}])
    assert (
        ours.render_chat([{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}], "weight": 1}])
        == plain
    )
    calls = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert "None" not in ours.render_chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": calls}])
    prefilled = ours.render_chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert prefilled.endswith("b<|im_end|>\n<|im_start|>assistant\n")
    for bad in (
        [],
        ["x"],
        [{"role": "user", "content": 5}],
        [{"content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
    ):
        with pytest.raises(InputError):
            ours.render_chat(bad)  # type: ignore[arg-type]


def test_without_a_template_messages_are_the_rows_error(tmp_path: Path) -> None:
    ours = load_tokenizer(folder_with(tmp_path, build_tokenizer()))
    assert not ours.has_chat_template
    with pytest.raises(InputError, match=r"no chat template.*`prompt`"):
        ours.render_chat([{"role": "user", "content": "a"}])


def test_half_a_surrogate_pair_is_an_input_error(tiny: Path) -> None:
    ours = load_tokenizer(resolve_model(str(tiny / "m")))
    with pytest.raises(InputError, match="surrogate"):
        ours.encode("a\ud800b", True)
    assert ours.min_tokens_of("a\ud800b") >= 1


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=200))
def test_min_tokens_is_never_more_than_the_tokens(tiny: Path, piece_file: Path, text: str) -> None:
    for ours in (load_tokenizer(resolve_model(str(tiny / "m"))), of_gguf(piece_file)):
        assert ours.min_tokens_of(text) <= len(ours.encode(text, False))
    assert of_gguf(piece_file).min_tokens_of("x" * 1000) >= 100


def test_no_bound_where_text_may_vanish_or_be_swallowed() -> None:
    table = [bytes([byte]) for byte in range(256)] + [b"abc"]
    shrinking, swallowing, dropping = build_tokenizer(), build_tokenizer(), build_tokenizer()
    shrinking.normalizer = normalizers.NFC()
    swallowing.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    dropping.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])
    assert bytes_per_token(build_tokenizer(), table) == 3
    assert bytes_per_token(build_tokenizer(), table[1:]) is None  # one byte has no token: it is dropped
    for tokenizer in (shrinking, swallowing, dropping, tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))):
        assert bytes_per_token(tokenizer, table) is None


def test_a_prompt_of_megabytes_is_encoded_in_linear_time(tiny: Path, piece_file: Path) -> None:
    for ours in (load_tokenizer(resolve_model(str(tiny / "m"))), of_gguf(piece_file)):
        for unit in ("the and ing ", "a", " ", "日"):
            text = unit * (1_000_000 // len(unit.encode()))
            assert ours.decode(ours.encode(text, False)) == text


@pytest.mark.parametrize(
    "name,what", [("tokenizer.model", "SentencePiece"), ("vocab.json", "vocabulary with merges"), ("x", "has no tokenizer.json")]
)
def test_other_tokenizer_files_are_named(tmp_path: Path, name: str, what: str) -> None:
    files = folder_with(tmp_path, None)
    (tmp_path / name).write_text("x")
    with pytest.raises(ModelError, match=what):
        load_tokenizer(files)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}', "\x00\xff"])
def test_broken_tokenizer_files_are_messages(tmp_path: Path, text: str) -> None:
    files = folder_with(tmp_path, None)
    (tmp_path / "tokenizer.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(files)


def test_hostile_tokenizer_files_are_messages(tmp_path: Path) -> None:
    good = json.loads(build_tokenizer(add_bos=True).to_str())
    huge = json.loads(json.dumps(good))
    huge["model"]["vocab"]["zz"] = 2**31
    aborting = json.loads(json.dumps(good))
    aborting["post_processor"]["special_tokens"] = {}
    for broken in (huge, aborting):
        files = folder_with(tmp_path, None)
        (tmp_path / "tokenizer.json").write_text(json.dumps(broken))
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            load_tokenizer(files)


def test_tokenizers_load_without_torch_or_transformers(tiny: Path) -> None:
    code = (
        "import sys; from batchinfer.weights.source import resolve_model; from batchinfer.io.tokenizer import load_tokenizer;"
        f"load_tokenizer(resolve_model({str(tiny / 'm')!r})); load_tokenizer(resolve_model({str(tiny / 'm.gguf')!r}));"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0
