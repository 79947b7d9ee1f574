"""GGUF: metadata and every dequantisable type read back; damage is refused from the header."""

from __future__ import annotations

import resource
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.errors import ModelError, UnsupportedModel
from batchinfer.weights import gguf as gguf_reader
from batchinfer.weights.gguf import GgufCheckpoint, can_dequantise, read_gguf

ROWS, COLUMNS = 6, 512


def write_file(path: Path, *, alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_string("text", "grüße")
    writer.add_array("strings", ["a", "", "ü"])
    writer.add_array("numbers", [1.5, 2.5])
    writer.add_array("flags", [True, False])
    writer.add_bool("yes", True)
    writer.add_int64("negative", -(1 << 40))
    writer.add_tensor("a", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("b", np.arange(6, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensors_read_back(tmp_path: Path) -> None:
    header = read_gguf(write_file(tmp_path / "m.gguf"))
    assert header.architecture == "llama"
    assert header.metadata["text"] == "grüße"
    assert header.metadata["strings"] == ["a", "", "ü"]
    assert header.metadata["numbers"].tolist() == [1.5, 2.5]
    assert header.metadata["flags"].tolist() == [True, False]
    assert header.metadata["yes"] is True
    assert header.metadata["negative"] == -(1 << 40)
    checkpoint = GgufCheckpoint(header.path)
    a, b = checkpoint.read("a"), checkpoint.read("b")
    assert (a.dtype, a.shape, b.dtype, b.shape) == ("float32", (3, 4), "float16", (6,))
    np.testing.assert_array_equal(a.data.view(np.float32), np.arange(12))
    np.testing.assert_array_equal(b.data.view(np.float16), np.arange(6))


@pytest.mark.parametrize("piece", [1, 7, 64])
def test_text_that_reaches_over_a_piece_of_the_header_reads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(gguf_reader._Cursor, "PIECE", piece)
    words = ["", "a", "grüße" * 20, " ", "\0"]
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("strings", words)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_gguf(path).metadata["strings"] == words


def quantised_types() -> list[str]:
    return sorted(kind.name for kind in GGMLQuantizationType if kind.name not in ("F32", "F16", "BF16") and can_dequantise(kind.name))


@pytest.mark.parametrize("kind", quantised_types())
def test_every_quantised_type_equals_the_reference(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchinfer.weights.gguf.CHUNK_ELEMENTS", 2 * COLUMNS)  # several chunks, the last one short
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    data = np.random.default_rng(1).integers(0, 256, (ROWS - 1, COLUMNS // block * block_bytes), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("t", data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"):  # random scales overflow
        raw = GgufCheckpoint(tmp_path / "m.gguf").read("t")
        expected = gguf.quants.dequantize(data, GGMLQuantizationType[kind])
    assert raw.shape == expected.shape == (ROWS - 1, COLUMNS)
    np.testing.assert_array_equal(raw.data.view(np.float32).reshape(expected.shape), expected)


def test_the_types_that_files_in_the_wild_use_are_read() -> None:
    assert {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"} <= set(quantised_types())


def patched(raw: bytes, offset: int, value: bytes) -> bytes:
    return raw[:offset] + value + raw[offset + len(value) :]


def alignment_at(raw: bytes) -> int:
    key = b"general.alignment"
    return raw.index(key) + len(key) + 4


CORRUPTIONS = {
    "empty": lambda d: b"",
    "short": lambda d: d[:-100],
    "magic": lambda d: b"GGUX" + d[4:],
    "version": lambda d: patched(d, 4, struct.pack("<I", 77)),
    "big endian": lambda d: patched(d, 4, struct.pack(">I", 3)),
    "tensor count": lambda d: patched(d, 8, struct.pack("<Q", 1 << 60)),
    "one tensor more": lambda d: patched(d, 8, struct.pack("<Q", 3)),
    "key count": lambda d: patched(d, 16, struct.pack("<Q", 1 << 60)),
    "cut header": lambda d: d[:70],
    "alignment 0": lambda d: patched(d, alignment_at(d), struct.pack("<I", 0)),
    "alignment 3": lambda d: patched(d, alignment_at(d), struct.pack("<I", 3)),
    "alignment huge": lambda d: patched(d, alignment_at(d), struct.pack("<I", 1 << 31)),
    "key length": lambda d: patched(d, 24, struct.pack("<Q", (1 << 64) - 1)),
    "array count": lambda d: patched(d, d.index(b"strings") + 7 + 8, struct.pack("<Q", 1 << 50)),
    "number count": lambda d: patched(d, d.index(b"numbers") + 7 + 8, struct.pack("<Q", 1 << 61)),
    "value type": lambda d: patched(d, d.index(b"negative") + 8, struct.pack("<I", 99)),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_broken_files_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = write_file(tmp_path / "m.gguf", alignment=64)
    path.write_bytes(CORRUPTIONS[kind](path.read_bytes()))
    with pytest.raises(ModelError, match=r"m\.gguf"):
        read_gguf(path)


@pytest.mark.parametrize("count", [(1 << 22) + 1, 1 << 33])
def test_a_big_sparse_file_that_states_a_huge_array_costs_little(tmp_path: Path, count: int) -> None:
    path = tmp_path / "m.gguf"
    key = b"x"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + key + struct.pack("<IIQ", 9, 8, count))
        file.truncate(1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match=r"m\.gguf"):
        read_gguf(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_unknown_tensor_type_is_named(tmp_path: Path) -> None:
    path = write_file(tmp_path / "m.gguf")
    raw = path.read_bytes()
    at = raw.index(b"\x01\x00\x00\x00\x00\x00\x00\x00b") + 9 + 4 + 8  # name, dimensions, one extent
    path.write_bytes(patched(raw, at, struct.pack("<I", 4)))
    with pytest.raises(UnsupportedModel, match="tensor b has GGUF type 4"):
        read_gguf(path)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_random_damage_is_never_anything_but_a_model_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    raw = bytearray(write_file(folder / "good.gguf").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = folder / "bad.gguf"
    path.write_bytes(raw[: data.draw(st.integers(len(raw) // 2, len(raw)))])
    try:
        header = read_gguf(path)
    except ModelError:
        return
    size = path.stat().st_size
    assert all(e.offset + e.num_bytes <= size for e in header.entries.values())
