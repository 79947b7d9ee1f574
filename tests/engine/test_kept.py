"""Packed weights on the disk: a start that finds them gives the same bytes without reading the checkpoint; damage is seen and undone."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchinfer import build_model
from batchinfer.build import ModelHandle, WeightShelf, compute_target, load_weights, open_model
from batchinfer.config import EngineConfig
from batchinfer.core.request import Request, SamplingParams
from batchinfer.errors import CapacityError
from batchinfer.layers.linear import pack_int8_narrow
from batchinfer.model import kept, load
from batchinfer.ops.layouts import Int8Channel
from batchinfer.ops.native.rowwise import native_int8_ops
from batchinfer.ops.table import Choice
from batchinfer.runtime import pool_size
from batchinfer.runtime.pool_size import PoolRequest, choose_num_blocks
from batchinfer.stopwatch import StageWatch
from batchinfer.weights import packed_shelf, source
from batchinfer.weights.packed_file import ALIGNMENT, DamagedFile, PackedFile, PackedWriter
from batchinfer.weights.packed_shelf import LIMIT_VARIABLE, kept_weights
from tests.engine.engines import build, open_tiny, run_all
from tests.oracle.tiny_models import write_gguf, write_tiny

PROMPT = np.arange(3, 23, dtype=np.int32)
KINDS = ("none", "int8", "int4")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    return write_gguf(write_tiny(folder / "m", "llama3.2"), folder / "m.gguf")


@pytest.fixture
def model(gguf_file: Path) -> ModelHandle:
    return open_tiny(gguf_file)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and no model too small to be kept. What was measured and built stays from test to test."""
    monkeypatch.setattr(build_model, "LEAST_KEPT_BYTES", 0)
    monkeypatch.setattr(packed_shelf, "packed_folder", lambda: tmp_path / "packed")
    monkeypatch.setattr(kept, "packed_folder", lambda: tmp_path / "packed")
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)


@pytest.fixture
def no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> Any:
    def refuse(*given: object) -> None:
        raise AssertionError("the checkpoint was read")

    return lambda: monkeypatch.setattr(load, "iter_weights", refuse)


def files() -> list[Path]:
    return sorted(packed_shelf.packed_folder().glob("*"))


def said(model: ModelHandle, **options: Any) -> list[int]:
    """Tokens of greedy rows: the same bits, or else soon other ones."""
    rows = [Request(row, PROMPT + row, SamplingParams(max_tokens=12, ignore_eos=True)) for row in range(3)]
    results = run_all(build(model, **options), rows)
    return [token for row in sorted(results) for token in results[row].token_ids]


def tensors(model: ModelHandle, quantization: str, dtype: str = "auto") -> list[torch.Tensor]:
    """Every tensor of the loaded weights; what is opaque by its values as far as torch shows them."""
    target = compute_target(EngineConfig(model=str(model.files.path), device="cpu", quantization=quantization, dtype=dtype), model)
    decoder, head = load_weights(model, target)
    layouts = [getattr(layer, name).layout for layer in decoder.layers for name in ("qkv", "o", "gate_up", "down")]
    layouts += [linear.layout for linear in head._slices]
    found = [decoder._embed, decoder._norm, *(layer.attn_norm for layer in decoder.layers), *(layer.mlp_norm for layer in decoder.layers)]
    for layout in layouts:
        found += [value for value in (getattr(layout, name) for name in layout.__slots__) if isinstance(value, torch.Tensor)]
    return [t.to_dense() if t.is_mkldnn else t for t in found]


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("quantization", KINDS)
def test_a_second_start_reads_no_checkpoint_and_computes_the_same(
    model: ModelHandle, no_checkpoint: Any, quantization: str, dtype: str
) -> None:
    first, words = tensors(model, quantization, dtype), said(model, quantization=quantization, dtype=dtype)
    assert len(files()) == 1
    no_checkpoint()
    again = tensors(model, quantization, dtype)
    assert len(first) == len(again)
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert said(model, quantization=quantization, dtype=dtype) == words


@pytest.mark.parametrize("shape", ["biases", "head_dim"])
def test_biases_and_a_head_of_its_own_are_kept_too(tmp_path: Path, no_checkpoint: Any, shape: str) -> None:
    handle = open_tiny(write_tiny(tmp_path / "m", shape))
    for quantization in ("int8", "int4"):
        first = tensors(handle, quantization)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(load, "iter_weights", None)
            again = tensors(handle, quantization)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len(files()) == 2


def test_a_checkpoint_in_the_runs_own_dtype_is_not_copied(tmp_path: Path) -> None:
    handle = open_tiny(write_tiny(tmp_path / "m", "llama3.2"))
    tensors(handle, "none", "float32")
    assert not files()


def test_small_models_are_not_kept(model: ModelHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_model, "LEAST_KEPT_BYTES", 8 << 20)
    tensors(model, "int8")
    assert not files()


DAMAGE = {
    "a byte": lambda d: d[: len(d) - 3000] + bytes([d[-3000] ^ 1]) + d[len(d) - 2999 :],
    "cut short": lambda d: d[: len(d) // 2],
    "empty": lambda d: b"",
    "no header": lambda d: b"\0" * 4096 + d[4096:],
    "longer": lambda d: d + b"x",
    "zeros at the end": lambda d: d[:-20_000] + b"\0" * 20_000,
    "other sums": lambda d: d.replace(b'\\"embed/dense/weight\\": \\"', b'\\"embed/dense/weighs\\": \\"'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_noticed_said_and_undone(model: ModelHandle, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    first = tensors(model, "int8")
    [place] = files()
    whole = place.read_bytes()
    assert DAMAGE[damage](whole) != whole
    place.write_bytes(DAMAGE[damage](whole))
    with caplog.at_level(logging.WARNING):
        again = tensors(model, "int8")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert "damaged" in caplog.text
    assert "packed again" in caplog.text
    assert files() == [place]
    assert place.read_bytes() == whole


def test_another_checkpoint_dtype_quantization_or_code_is_another_file(
    gguf_file: Path, model: ModelHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors(model, "int8")
    tensors(model, "int8")
    assert len(files()) == 1
    tensors(model, "int4")
    tensors(model, "int8", "float32")
    assert len(files()) == 3
    status = gguf_file.stat()
    os.utime(gguf_file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    tensors(model, "int8")
    assert len(files()) == 4
    monkeypatch.setattr(kept, "_code", lambda: "other")
    tensors(model, "int8")
    assert len(files()) == 5
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "STRICT")
    tensors(model, "int8")
    assert len(files()) == 6


def test_one_kind_of_layer_in_two_layouts_is_two_files(model: ModelHandle) -> None:
    """8-bit weights have 7 bits where the processor's products need that."""
    target = compute_target(EngineConfig(model=str(model.files.path), device="cpu", quantization="int8"), model)
    load_weights(model, target)
    narrow = Choice("matmul", "oneDNN, int8 with 7-bit weights", "")
    others = tuple(narrow if choice.operation == "matmul" else choice for choice in target.choices)
    kind = replace(target.linear, pack=pack_int8_narrow, head_pack=pack_int8_narrow)
    ops = native_int8_ops(target.native.library) if target.native.library is not None else target.ops
    head = load_weights(model, replace(target, linear=kind, choices=others, ops=ops))[1]
    assert isinstance(head._slices[0].layout, Int8Channel)
    assert len(files()) == 2


def test_code_in_every_subfolder_counts(tmp_path: Path) -> None:
    place = tmp_path / "model" / "families" / "llama.py"
    place.parent.mkdir(parents=True)
    place.write_text("PERMUTED = True")
    before = kept._code(tmp_path)
    kept._code.cache_clear()
    assert kept._code(tmp_path) == before
    place.write_text("PERMUTED = False")
    kept._code.cache_clear()
    assert kept._code(tmp_path) != before
    kept._code.cache_clear()


def test_a_large_checkpoint_put_in_anothers_place_with_its_time_is_another(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tools do that unpack archives."""
    monkeypatch.setattr(source, "SMALL_FILE_BYTES", 0)
    place, other = tmp_path / "m.gguf", tmp_path / "other"
    place.write_bytes(gguf_file.read_bytes())
    tensors(open_tiny(place), "int8")
    status = place.stat()
    other.write_bytes(gguf_file.read_bytes())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(place)
    tensors(open_tiny(place), "int8")
    assert len(files()) == 2


def test_the_contents_of_a_small_checkpoint_count(gguf_file: Path, model: ModelHandle, tmp_path: Path) -> None:
    """A file written again in the same second with the same size: tools that copy times do that."""
    copy = tmp_path / "m.gguf"
    raw = bytearray(gguf_file.read_bytes())
    copy.write_bytes(raw)
    tensors(open_tiny(copy), "int8")
    status = copy.stat()
    raw[-5] ^= 1
    copy.write_bytes(raw)
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    tensors(open_tiny(copy), "int8")
    assert len(files()) == 2


def test_a_mapped_weight_starts_where_vectors_do_and_never_reaches_the_file(model: ModelHandle) -> None:
    tensors(model, "int4")
    [place] = files()
    before = place.read_bytes()
    file = PackedFile(place)
    assert all(entry.offset % ALIGNMENT == 0 for entry in file.entries.values())
    name = next(iter(file.entries))
    data = file.read(name)
    assert data.ctypes.data % ALIGNMENT == 0
    data[:] = 0
    assert place.read_bytes() == before
    place.unlink()
    assert file.read(next(name for name in file.entries if "mlp_norm" in name)).any(), "a deleted file lives on while it is mapped"


def test_what_is_let_go_can_be_read_again(model: ModelHandle) -> None:
    tensors(model, "int8")
    file = PackedFile(files()[0])
    for name in file.entries:
        data = file.read(name)
        before = data.copy()
        file.let_go(name)
        assert np.array_equal(data, before)


def test_a_disk_that_refuses_costs_only_the_next_start(
    model: ModelHandle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tensors(model, "int8")
    for path in files():
        path.unlink()
    count = iter(range(100))
    add = PackedWriter.add

    def full(*given: Any) -> None:
        if next(count) > 5:
            raise OSError(28, "No space left on device")
        add(*given)

    monkeypatch.setattr(PackedWriter, "add", full)
    with caplog.at_level(logging.WARNING):
        assert all(torch.equal(a, b) for a, b in zip(expected, tensors(model, "int8"), strict=True))
    assert caplog.text.count("No space left on device") == 1
    assert not files()


def test_a_folder_that_cannot_be_is_said_once(model: ModelHandle, caplog: pytest.LogCaptureFixture) -> None:
    packed_shelf.packed_folder().write_text("in the way")
    with caplog.at_level(logging.WARNING):
        tensors(model, "int8")
    assert caplog.text.count("packed weights are not kept") == 1


def test_processes_beside_each_other_leave_one_file_and_say_the_same(gguf_file: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from batchinfer import build_model; from batchinfer.model import kept\n"
        "from batchinfer.weights import packed_shelf; from tests.engine.test_kept import open_tiny, said\n"
        "build_model.LEAST_KEPT_BYTES = 0; packed_shelf.packed_folder = kept.packed_folder = lambda: Path(sys.argv[2])\n"
        "print(said(open_tiny(Path(sys.argv[1])), quantization='int8'))"
    )
    command = [sys.executable, "-c", script, str(gguf_file), str(packed_shelf.packed_folder())]
    started = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [subprocess.Popen(command, env=started, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ended = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0, 0], ended
    assert ended[0] == ended[1]
    assert len(files()) == 1


def test_a_run_tells_what_was_kept_and_found(model: ModelHandle) -> None:
    target = compute_target(EngineConfig(model=str(model.files.path), device="cpu", quantization="int8"), model)
    told = []
    for _ in range(2):
        watch = StageWatch()
        load_weights(model, target, watch)
        told.append({stage.name: stage.detail for stage in watch.stages})
    assert told[0]["keep the packed weights"].endswith("MB for the next start")
    assert told[1]["read the packed weights"].endswith("MB of an earlier start")
    assert "keep the packed weights" not in told[1]


def test_a_load_that_is_given_up_leaves_nothing(model: ModelHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(*given: Any) -> Any:
        for index, item in enumerate(load._stream(*load._plan(model.files, model.config))):
            if index == 5:
                raise KeyboardInterrupt
            yield item

    monkeypatch.setattr(load, "iter_weights", torn)
    with pytest.raises(KeyboardInterrupt):
        tensors(model, "int8")
    assert not files()


@pytest.mark.parametrize("given", ["off", "0", "1000"])
def test_nothing_is_kept_above_the_limit(model: ModelHandle, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, given)
    tensors(model, "int8")
    assert not files()


def test_a_use_makes_a_file_the_youngest(model: ModelHandle) -> None:
    tensors(model, "int8")
    [place] = files()
    os.utime(place, (0, 0))
    tensors(model, "int8")
    assert place.stat().st_mtime > time.time() - 60
    assert [(each.model, each.form.split(",")[0]) for each in kept_weights()] == [(str(model.files.path), "int8")]


def test_mapped_weights_are_no_free_memory(model: ModelHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    target = compute_target(EngineConfig(model=str(model.files.path), device="cpu", quantization="int4"), model)
    assert load_weights(model, target)[0].mapped_bytes == 0
    mapped = load_weights(model, target)[0].mapped_bytes
    assert 0 < mapped <= build_model.weight_footprint(model, target).held + 2 * 4 * 2048
    monkeypatch.setattr(pool_size, "free_bytes", lambda device, mapped=0: 1000 * 1000 - mapped)
    ask = {"block_size": 16, "bytes_per_token": 10, "max_model_len": 10**6, "max_num_seqs": 8, "num_blocks": None, "memory": None}
    blocks = [choose_num_blocks(PoolRequest(**ask, need_tokens=10**6, mapped=mapped), torch.device("cpu"))[0] for mapped in (0, 500 * 1000)]  # type: ignore[arg-type]
    assert blocks == [2500, 1250]


def test_weights_on_the_shelf_are_no_free_memory(model: ModelHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped ones of one target go before another target's take their memory."""
    targets = [compute_target(EngineConfig(model=str(model.files.path), device="cpu", quantization=q), model) for q in ("int4", "none")]
    for target in targets:
        load_weights(model, target)
    peak = build_model.weight_footprint(model, targets[1]).peak
    monkeypatch.setattr(pool_size, "free_bytes", lambda device, mapped=0: peak + 1000 - mapped)
    shelf = WeightShelf()
    first = shelf.load(model, targets[0])
    assert first[0].mapped_bytes > 1000
    shelf.load(model, targets[1])
    assert shelf.load(model, targets[0]) is not first


def test_a_kept_model_that_does_not_fit_is_refused_all_the_same(model: ModelHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors(model, "int8")
    monkeypatch.setattr(pool_size, "free_bytes", lambda device, mapped=0: 1000)
    with pytest.raises(CapacityError, match="as int8"):
        tensors(model, "int8")


def test_names_of_files_tell_nothing_and_headers_the_model(model: ModelHandle) -> None:
    tensors(model, "int8")
    [place] = files()
    raw = place.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header["__metadata__"]["model"] == str(model.files.path)
    with pytest.raises(DamagedFile):
        PackedFile(Path(os.devnull))


@pytest.mark.model
def test_the_default_model_is_kept_and_found(smollm2: Any, no_checkpoint: Any) -> None:
    handle = open_model(EngineConfig(model=str(smollm2.path), device="cpu"))
    for quantization in ("int8", "int4"):
        first = tensors(handle, quantization)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(load, "iter_weights", None)
            again = tensors(handle, quantization)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
