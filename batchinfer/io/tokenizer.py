"""Text to token ids and back, chat rendering, and the vocabulary's facts, for a folder or a GGUF file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from batchinfer.core.vocabulary import Vocabulary
from batchinfer.errors import InputError, ModelError
from batchinfer.io.chat_options import PLAIN_CHAT, ChatOptions
from batchinfer.io.chat_template import ChatTemplate, choose_template, folder_template
from batchinfer.io.gguf_tokenizer import build_tokenizer, num_tokens, read_tokens
from batchinfer.io.messages import clean_messages
from batchinfer.io.shrinking import bytes_per_token
from batchinfer.io.token_bytes import token_bytes
from batchinfer.io.tool_calls import ToolFormat, find_format
from batchinfer.io.truncate import PlacedTokens
from batchinfer.model.generation import gguf_eos_ids, read_generation_config
from batchinfer.weights.gguf import GgufHeader, read_gguf
from batchinfer.weights.json_file import read_json
from batchinfer.weights.source import ModelFiles, read_json_if_there

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_VOCABULARY = 1 << 24
TRIAL_TEXT = "A first text: 12 x\n\té 日本 😍 "
OTHER_TOKENIZERS = {
    "tokenizer.model": "a SentencePiece model",
    "vocab.json": "a vocabulary with merges",
    "tekken.json": "a Tekken file",
    "tiktoken.model": "a tiktoken file",
}


@dataclass(frozen=True, slots=True, eq=False)
class Tokenizer:
    """A model's tokenizer. `vocabulary.eos_ids` is the union of every place that states one."""

    backend: tokenizers.Tokenizer
    vocabulary: Vocabulary
    template: ChatTemplate | None
    max_bytes_per_token: int | None  # None: tokens may swallow any number of bytes

    @property
    def has_chat_template(self) -> bool:
        """True when conversations can be rendered."""
        return self.template is not None

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of every text. One text that is no valid Unicode fails the call with `InputError`."""
        try:
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as err:  # lone surrogates cannot cross into the library
            raise InputError("the prompt holds half a surrogate pair, which is not valid Unicode text", "invalid_text") from err
        return [encoding.ids for encoding in encodings]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of one text."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_placed(self, text: str, add_special_tokens: bool) -> PlacedTokens:
        """Token ids of one text with the characters that they stand for."""
        try:
            encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as err:
            raise InputError("the prompt holds half a surrogate pair, which is not valid Unicode text", "invalid_text") from err
        places = np.array(encoding.offsets, np.int32).reshape(-1, 2)
        added = np.array(encoding.special_tokens_mask, bool)
        return PlacedTokens(np.array(encoding.ids, np.int32), places[:, 0], places[:, 1], added)

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls, where that is known."""
        if self.template is None:
            return None
        return find_format(self.template.source, lambda token: self.backend.token_to_id(token) is not None)

    def special_ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of those texts that are special tokens."""
        found = (self.backend.token_to_id(text) for text in texts)
        return frozenset(index for index in found if index is not None and index in self.vocabulary.special_ids)

    def min_tokens_of(self, text: str) -> int:
        """A number of tokens that `text` is sure to reach, without tokenising it: cheap refusal of prompts far too long."""
        if self.max_bytes_per_token is None:
            return 0
        size = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        return -(-size // self.max_bytes_per_token)

    def render_chat(self, messages: list[dict[str, Any]], *, date: datetime | None = None, options: ChatOptions = PLAIN_CHAT) -> str:
        """The prompt of a conversation.

        Unless `options` say so, a last message of the assistant is a turn like any other, and a new generation prompt
        follows it. `date` is what `strftime_now` prints; None is today.
        """
        if self.template is None:
            raise InputError(
                "this model has no chat template, so messages cannot become a prompt; pass rows with `prompt` instead", "no_chat_template"
            )
        return self.template.render(clean_messages(messages, "messages"), date, options)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self.vocabulary.decode(ids, skip_special_tokens)


def load_tokenizer(files: ModelFiles, header: GgufHeader | None = None) -> Tokenizer:
    """The tokenizer of a model's files. `header`: of the GGUF file, where it was read."""
    return _from_gguf(header or read_gguf(files.path)) if files.kind == "gguf" else _from_folder(files)


def _from_folder(files: ModelFiles) -> Tokenizer:
    folder = files.path
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(_no_tokenizer(folder))
    backend = _read_backend(path)
    settings = read_json_if_there(folder / "tokenizer_config.json")
    special = _special_tokens(read_json_if_there(folder / "special_tokens_map.json") | settings)
    eos = list(read_generation_config(files).eos_ids)
    if "eos_token" in special:
        stated = backend.token_to_id(special["eos_token"])
        eos = [stated, *eos] if stated is not None else eos
    found = folder_template(folder, settings)
    template = ChatTemplate(found[0], found[1], special) if found else None
    rows = read_json(folder / "config.json").get("vocab_size")  # a token without a row in the embedding is none
    return _finish(backend, eos, template, str(path), rows if isinstance(rows, int) and rows > 0 else None)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    """The file's pipeline, tried out once: a broken one may load and then abort inside the library."""
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
        backend.no_truncation()  # both would change prompts
        backend.no_padding()
        backend.encode(TRIAL_TEXT)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as err:  # the library's own panics are no Exception
        raise ModelError(f"{path}: not a tokenizer that the installed tokenizers package can read: {err}") from err
    return backend


def _no_tokenizer(folder: Path) -> str:
    if (folder / "tokenizer.json").is_symlink():
        return f"{folder / 'tokenizer.json'}: missing file: the link leads nowhere; fetch the model again"
    others = [f"{what} ({name})" for name, what in OTHER_TOKENIZERS.items() if (folder / name).exists()]
    hint = f"; it holds {others[0]}, which is not read: convert it with transformers (AutoTokenizer ... save_pretrained)" if others else ""
    return f"{folder}: has no tokenizer.json{hint}"


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens, written as text or as an object with `content`. Null ones stay undefined: they render as empty."""
    found = {}
    for name in SPECIAL_NAMES:
        value = settings.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _from_gguf(header: GgufHeader) -> Tokenizer:
    path = header.path
    tokens = read_tokens(header)
    backend = build_tokenizer(tokens)
    ids = {
        "bos_token": tokens.try_id("bos"),
        "eos_token": tokens.try_id("eos"),
        "unk_token": tokens.try_id("unknown"),
        "pad_token": tokens.try_id("padding"),
    }
    special = {name: tokens.tokens[index] for name, index in ids.items() if index is not None}
    source = choose_template(header.metadata.get("tokenizer.chat_template"), str(path))
    template = ChatTemplate(source, str(path), special) if source else None
    return _finish(backend, gguf_eos_ids(header), template, str(path), num_tokens(tokens))


def _finish(
    backend: tokenizers.Tokenizer, eos_ids: Iterable[int], template: ChatTemplate | None, place: str, size: int | None = None
) -> Tokenizer:
    by_token = backend.get_vocab(with_added_tokens=True)
    if not by_token:
        raise ModelError(f"{place}: the vocabulary is empty")
    if max(by_token.values()) >= MAX_VOCABULARY:
        raise ModelError(f"{place}: a token has id {max(by_token.values()):,}; no vocabulary is that large")
    tokens: list[str | None] = [None] * (max(by_token.values()) + 1)
    for token, index in by_token.items():
        tokens[index] = token
    tokens = tokens[:size]
    table = token_bytes(tokens, backend.decoder, place)
    added = backend.get_added_tokens_decoder()
    special_ids = frozenset(index for index, token in added.items() if token.special and index < len(tokens))
    eos = tuple(index for index in dict.fromkeys(eos_ids) if index < len(tokens))
    vocabulary = Vocabulary(table.table, special_ids, eos, table.strip_leading_space, table.byte_ids)
    return Tokenizer(backend, vocabulary, template, bytes_per_token(backend, table.table))
