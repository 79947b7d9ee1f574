"""GGUF files that hold nothing but a vocabulary."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def write_vocabulary(path: Path, model: str, tokens: list[tuple[str, int]], **keys: Any) -> Path:
    """Write the tokens with their types; `keys` are `tokenizer.ggml.*` or, with a dot, whole names."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("tokenizer.ggml.model", model)
    writer.add_array("tokenizer.ggml.tokens", [token for token, _ in tokens])
    writer.add_array("tokenizer.ggml.token_type", [kind for _, kind in tokens])
    for key, value in keys.items():
        name = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def sentencepiece_vocabulary(pieces: list[str]) -> tuple[list[tuple[str, int]], list[float]]:
    """<unk>, <s>, </s>, the 256 bytes, then `pieces` by falling score, then single characters, as SentencePiece lays out."""
    characters = sorted({char for piece in pieces for char in piece})
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    tokens += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    scores = [0.0] * len(tokens)
    whole = [piece for piece in pieces if len(piece) > 1]
    tokens += [(piece, NORMAL) for piece in [*whole, *characters]]
    scores += [-float(rank) for rank in range(len(whole) + len(characters))]
    return tokens, scores


def joined_by_score(text: str, tokens: list[tuple[str, int]], scores: list[float]) -> list[int]:
    """SentencePiece's BPE, written out plainly: join the neighbours whose whole scores best, leftmost first."""
    ids = {token: index for index, (token, kind) in enumerate(tokens) if kind in (NORMAL, USER_DEFINED)}
    symbols = list(text)
    while True:
        pairs = [(-scores[ids[a + b]], at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in ids]
        if not pairs:
            break
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    result = []
    for symbol in symbols:
        result += [ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()]
    return result
