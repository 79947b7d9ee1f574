"""A tokenizer built from GGUF metadata: byte-level BPE (`gpt2`) and SentencePiece-style BPE (`llama`)."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from batchinfer.errors import ModelError, UnsupportedModel
from batchinfer.io.token_bytes import METASPACE
from batchinfer.weights.gguf import GgufHeader

log = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # token types; 6, byte, needs nothing here
PREFIX = "tokenizer.ggml."
PADDING = re.compile(r"\[PAD\d+\]")

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_REST}"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}|\p{{N}}{{1,3}}|{_REST}"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before merging: expressions applied in turn, each isolating its matches."""

    expressions: tuple[str, ...]
    whole_words: bool = False  # a word that is a token is taken without merging
    add_bos: bool = False  # where the file does not say
    normalise: bool = False  # to NFC first


# `tokenizer.ggml.pre` -> what the model's own tokenizer does.
PRE_TOKENIZERS = {
    "default": PreTokenizer((GPT2,)),
    "gpt-2": PreTokenizer((GPT2,)),
    "phi-2": PreTokenizer((GPT2,)),
    "smollm": PreTokenizer((r"\p{N}", GPT2)),
    "starcoder": PreTokenizer((r"\p{N}", GPT2)),
    "refact": PreTokenizer((r"\p{N}", GPT2)),
    "llama-bpe": PreTokenizer((LLAMA3,), whole_words=True, add_bos=True),
    "llama3": PreTokenizer((LLAMA3,), whole_words=True, add_bos=True),
    "llama-v3": PreTokenizer((LLAMA3,), whole_words=True, add_bos=True),
    "smaug-bpe": PreTokenizer((LLAMA3,)),
    "dbrx": PreTokenizer((LLAMA3,)),
    "qwen2": PreTokenizer((QWEN2,), normalise=True),
    "tekken": PreTokenizer((TEKKEN,), whole_words=True, add_bos=True),
    "gpt-4o": PreTokenizer((GPT4O,)),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
}


@dataclass(frozen=True, slots=True, eq=False)
class GgufTokens:
    """The vocabulary that a GGUF file states."""

    place: str
    model: str
    tokens: list[str]
    types: list[int]
    metadata: Mapping[str, Any]

    def try_id(self, name: str, default: int | None = None) -> int | None:
        """The id of a special token such as `bos`, or None."""
        value = self.metadata.get(f"{PREFIX}{name}_token_id", default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise ModelError(f"{self.place}: {PREFIX}{name}_token_id is {value}, outside the vocabulary of {len(self.tokens):,} tokens")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A yes or no of the metadata."""
        return bool(self.metadata.get(PREFIX + name, default))


def read_tokens(header: GgufHeader) -> GgufTokens:
    """The vocabulary, checked for what the builders below rely on."""
    place, metadata = str(header.path), header.metadata
    model = metadata.get(PREFIX + "model")
    if model not in BUILDERS:
        raise UnsupportedModel(f"{place}: tokenizer model {model!r} is not supported by this version; supported: {', '.join(BUILDERS)}")
    tokens = metadata.get(PREFIX + "tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelError(f"{place}: metadata has no list {PREFIX}tokens")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if token in tokens[:index])
        raise ModelError(f"{place}: token {twice!r} stands twice in the vocabulary; the file is damaged")
    types = _numbers(place, metadata, "token_type", len(tokens)) if PREFIX + "token_type" in metadata else [NORMAL] * len(tokens)
    return GgufTokens(place, str(model), tokens, [int(kind) for kind in types], metadata)


def _numbers(place: str, metadata: Mapping[str, Any], key: str, count: int) -> list[float]:
    """One number for each token."""
    values = metadata.get(PREFIX + key)
    if not isinstance(values, np.ndarray) or len(values) < count:
        raise ModelError(f"{place}: {PREFIX}{key} does not match the vocabulary of {count:,} tokens")
    return list(values[:count].tolist())


def num_tokens(tokens: GgufTokens) -> int:
    """Size of the vocabulary without the padding that converters add where a model's embedding has more rows."""
    size = len(tokens.tokens)
    while size > 1 and tokens.types[size - 1] == UNUSED and PADDING.fullmatch(tokens.tokens[size - 1]):
        size -= 1
    return size


def build_tokenizer(tokens: GgufTokens) -> tokenizers.Tokenizer:
    """The `tokenizers` pipeline of a GGUF vocabulary."""
    tokenizer, add_bos, default_bos = BUILDERS[tokens.model](tokens)
    special = [t for t, kind in zip(tokens.tokens, tokens.types, strict=False) if kind in (CONTROL, UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    defined = [t for t, kind in zip(tokens.tokens, tokens.types, strict=False) if kind == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in defined])
    begin = tokens.try_id("bos", default_bos) if tokens.flag("add_bos_token", add_bos) else None
    end = tokens.try_id("eos") if tokens.flag("add_eos_token", False) else None
    if begin is not None or end is not None:
        parts = [tokens.tokens[begin]] if begin is not None else []
        names = [(tokens.tokens[i], i) for i in dict.fromkeys((begin, end)) if i is not None]
        ends = [tokens.tokens[end]] if end is not None else []
        tokenizer.post_processor = processors.TemplateProcessing(single=[*parts, "$A", *ends], special_tokens=names)
    return tokenizer


def _byte_level_bpe(tokens: GgufTokens) -> tuple[tokenizers.Tokenizer, bool, int | None]:
    name = tokens.metadata.get(PREFIX + "pre", "default")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{tokens.place}: pre-tokenizer {name!r} is not supported by this version; supported: {', '.join(PRE_TOKENIZERS)}"
        )
    if name == "default":
        log.warning("%s: does not say how its tokenizer cuts words; GPT-2's way is taken", tokens.place)
    pre = PRE_TOKENIZERS[name]
    merges = _merges(tokens)
    tokenizer = _bpe(tokens, merges, ignore_merges=pre.whole_words)
    if pre.normalise:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in pre.expressions]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos, None


def _merges(tokens: GgufTokens) -> list[tuple[str, str]]:
    lines = tokens.metadata.get(PREFIX + "merges")
    if not isinstance(lines, list):
        raise ModelError(f"{tokens.place}: metadata has no list {PREFIX}merges")
    merges = []
    for line in lines:
        cut = line.find(" ", 1) if isinstance(line, str) else -1
        if cut < 0:
            raise ModelError(f"{tokens.place}: merge {str(line)[:40]!r} is not a pair")
        merges.append((line[:cut], line[cut + 1 :]))
    return merges


def _sentencepiece_bpe(tokens: GgufTokens) -> tuple[tokenizers.Tokenizer, bool, int | None]:
    scores = _numbers(tokens.place, tokens.metadata, "scores", len(tokens.tokens))
    unknown = tokens.try_id("unknown", 0)
    tokenizer = _bpe(
        tokens,
        _merges_of_scores(tokens.tokens, tokens.types, scores),
        unk_token=None if unknown is None else tokens.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    replace = normalizers.Replace(" ", METASPACE)
    clean = [decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if tokens.flag("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(METASPACE), replace])
        clean.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(clean)
    return tokenizer, True, 1


def _merges_of_scores(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Merges in the order in which SentencePiece would join: the pair whose whole has the highest score first."""
    ids = {token: index for index, token in enumerate(tokens) if types[index] not in (UNKNOWN, CONTROL)}
    ranked = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], index, left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in ranked]


def _bpe(tokens: GgufTokens, merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens.tokens)}
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as err:  # the library raises bare exceptions
        raise ModelError(f"{tokens.place}: vocabulary and merges do not fit together: {err}") from err


BUILDERS = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
