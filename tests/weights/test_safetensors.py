"""Safetensors: what is read equals what was written; what is broken is refused by name, quickly, before any data is read."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from batchinfer.errors import ModelError, UnsupportedModel, WeightMismatch
from batchinfer.weights.safetensors import INDEX, SafetensorsCheckpoint, read_header, weight_files

ARRAYS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.linspace(-1, 1, 6, dtype=np.float16).reshape(2, 3),
    "empty": np.zeros((0, 4), np.float32),
}


def write_shards(folder: Path, names: dict[str, str], skip: tuple[str, ...] = ()) -> Path:
    folder.mkdir(exist_ok=True)
    for shard in set(names.values()) - set(skip):
        save_file({n: ARRAYS[n] for n in names if names[n] == shard and n in ARRAYS}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def check_values(checkpoint: SafetensorsCheckpoint, names: dict[str, np.ndarray]) -> None:
    assert set(checkpoint.entries) == set(names)
    for name, expected in names.items():
        raw = checkpoint.read(name)
        assert raw.shape == expected.shape
        assert raw.dtype == str(expected.dtype)
        np.testing.assert_array_equal(raw.data.view(expected.dtype).reshape(expected.shape), expected)


def test_single_file_reads_back(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_values(SafetensorsCheckpoint(tmp_path), ARRAYS)


def test_a_lone_file_of_another_name_is_taken(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "weights.safetensors")
    check_values(SafetensorsCheckpoint(tmp_path), ARRAYS)


def test_index_wins_over_a_single_file_and_over_unlisted_ones(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "m", {"a.weight": "m-1.safetensors", "b.weight": "m-2.safetensors"})
    for stale in ("model.safetensors", "m-9.safetensors"):
        save_file({n: np.zeros_like(a) for n, a in ARRAYS.items()}, folder / stale)
    check_values(SafetensorsCheckpoint(folder), {n: ARRAYS[n] for n in ("a.weight", "b.weight")})
    assert [p.name for p in weight_files(folder)] == ["m-1.safetensors", "m-2.safetensors"]


def test_a_stale_copy_in_another_shard_is_not_taken(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "m", {"a.weight": "m-1.safetensors", "b.weight": "m-2.safetensors"})
    save_file({"b.weight": ARRAYS["b.weight"], "a.weight": ARRAYS["a.weight"] + 9}, folder / "m-2.safetensors")
    check_values(SafetensorsCheckpoint(folder), {n: ARRAYS[n] for n in ("a.weight", "b.weight")})


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "m", {"a.weight": "m-1.safetensors", "b.weight": "m-2.safetensors"}, skip=("m-2.safetensors",))
    with pytest.raises(ModelError, match=r"m-2\.safetensors: missing file"):
        SafetensorsCheckpoint(folder)


def test_tensor_that_no_shard_has_is_named(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "m", {"a.weight": "m-1.safetensors", "gone.weight": "m-1.safetensors"})
    with pytest.raises(WeightMismatch, match=r"gone\.weight"):
        SafetensorsCheckpoint(folder)


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "C:\\x.safetensors", "..\\x.safetensors", ""]
)
def test_index_entries_that_leave_the_folder_are_refused(tmp_path: Path, shard: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a.weight": shard}}))
    with pytest.raises(ModelError, match=r"a\.weight.*leaves the model's folder"):
        SafetensorsCheckpoint(tmp_path)


def test_index_entries_that_are_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a.weight": "pytorch_model.bin"}}))
    with pytest.raises(UnsupportedModel, match="only safetensors"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "\x00", "[" * 100_000])
def test_broken_index_is_a_message(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ModelError, match=r"index\.json"):
        SafetensorsCheckpoint(tmp_path)


def test_hub_cache_links_are_followed_and_dangling_ones_named(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file(ARRAYS, blobs / "0f")
    (snapshot / "model.safetensors").symlink_to(os.path.join("..", "..", "blobs", "0f"))
    check_values(SafetensorsCheckpoint(snapshot), ARRAYS)
    (blobs / "0f").unlink()
    with pytest.raises(ModelError, match="missing file: the link points to"):
        SafetensorsCheckpoint(snapshot)


def rewritten(data: bytes, change: dict[str, object]) -> bytes:
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header["a.weight"] |= change
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data[8 + length :]


CORRUPTIONS = {
    "empty": lambda d: b"",
    "seven bytes": lambda d: d[:7],
    "cut header": lambda d: d[:40],
    "cut data": lambda d: d[:-5],
    "huge header": lambda d: struct.pack("<Q", 1 << 62) + d[8:],
    "negative header": lambda d: struct.pack("<Q", (1 << 64) - 3) + d[8:],
    "not json": lambda d: d[:8] + b"\xff" + d[9:],
    "header a list": lambda d: struct.pack("<Q", 2) + b"[]" + d,
    "deep header": lambda d: struct.pack("<Q", 200_000) + b"[" * 200_000,
    "key twice": lambda d: struct.pack("<Q", 15) + b'{"a":{},"a":{}}',
    "entry a number": lambda d: struct.pack("<Q", 7) + b'{"a":1}',
    "larger shape": lambda d: rewritten(d, {"shape": [3, 5]}),
    "huge shape": lambda d: rewritten(d, {"shape": [2**40, 2**40]}),
    "negative shape": lambda d: rewritten(d, {"shape": [-3, -4]}),
    "shape of floats": lambda d: rewritten(d, {"shape": [3.0, 4]}),
    "no shape": lambda d: rewritten(d, {"shape": None}),
    "offset past end": lambda d: rewritten(d, {"data_offsets": [10**12, 10**12 + 48]}),
    "offsets reversed": lambda d: rewritten(d, {"data_offsets": [48, 0]}),
    "overlap": lambda d: rewritten(d, {"data_offsets": [4, 52]}),
    "bytes after the last tensor": lambda d: d + b"x" * 100,
    "unknown dtype": lambda d: rewritten(d, {"dtype": "F7"}),
    "other size": lambda d: rewritten(d, {"dtype": "F64"}),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_broken_files_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({n: ARRAYS[n] for n in ("a.weight", "b.weight")}, path)
    path.write_bytes(CORRUPTIONS[kind](path.read_bytes()))
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        SafetensorsCheckpoint(tmp_path)


def test_a_hole_between_tensors_is_refused(tmp_path: Path) -> None:
    header = json.dumps(
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "b": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}}
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"x" * 12)
    with pytest.raises(ModelError, match="tensor a and tensor b leave a hole"):
        SafetensorsCheckpoint(tmp_path)


def test_file_cut_while_reading_is_a_message(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a.weight": ARRAYS["a.weight"]}, path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelError, match=r"ends inside tensor a\.weight"):
        checkpoint.read("a.weight")


def test_quantised_dtype_is_refused_when_read(tmp_path: Path) -> None:
    save_file({"q": np.zeros((2, 2), np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="tensor q has dtype I8"):
        SafetensorsCheckpoint(tmp_path).read("q")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_damage_is_never_anything_but_a_model_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "model.safetensors"
    save_file({n: ARRAYS[n] for n in ("a.weight", "b.weight")}, path)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        entries = read_header(path)
    except ModelError:
        return
    size = path.stat().st_size
    assert all(e.offset + e.num_bytes <= size for e in entries.values())
