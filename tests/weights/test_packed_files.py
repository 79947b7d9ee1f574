"""Files of packed weights and their folder: whole or not there, damage always seen, bounded in size."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from batchinfer.errors import ConfigError
from batchinfer.weights import packed_shelf
from batchinfer.weights.packed_file import SUMMED, DamagedFile, PackedFile, PackedWriter, checksum
from batchinfer.weights.packed_shelf import LIMIT_VARIABLE, kept_weights, make_room, packed_folder, packed_limit, require_room, try_open

NAMES = ("embed/dense/weight", "layers.0.qkv/int8 tiles/tiles")
DATA = np.random.default_rng(0).integers(0, 256, 20_001, dtype=np.uint8)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)


def written(name: str) -> Path:
    place = packed_folder() / f"{name}.safetensors"
    fill(PackedWriter(place, len(NAMES)))
    return place


def fill(writer: PackedWriter) -> None:
    for name in NAMES:
        writer.add(name, "I8", (3, 6667), DATA)
    writer.finish({"model": "m", "form": "int8, bf16"})


def there() -> list[str]:
    return sorted(path.name for path in packed_folder().iterdir())


def read_all(place: Path) -> None:
    file = PackedFile(place)
    for name in file.entries:
        file.read(name)


def test_what_is_written_is_read() -> None:
    place = written("a")
    file = PackedFile(place)
    assert {name: (entry.format, entry.shape) for name, entry in file.entries.items()} == dict.fromkeys(NAMES, ("I8", (3, 6667)))
    assert all(np.array_equal(file.read(name), DATA) for name in NAMES)
    assert file.facts == {"model": "m", "form": "int8, bf16"}
    assert file.num_bytes == place.stat().st_size


def test_other_readers_of_safetensors_read_it_too() -> None:
    from safetensors.numpy import load_file

    found = load_file(written("a"))
    assert all(np.array_equal(found[name].view(np.uint8).reshape(-1), DATA) for name in NAMES)


def test_a_changed_byte_anywhere_is_seen() -> None:
    place = written("a")
    whole = place.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    used = len(whole[8 : 8 + length].rstrip())
    meaningless = padding(PackedFile(place), len(whole))
    for at in (*range(8 + used), *range(8 + length, len(whole), 997)):
        if any(at in gap for gap in meaningless):
            continue
        torn = bytearray(whole)
        torn[at] ^= 1
        place.write_bytes(torn)
        with pytest.raises(DamagedFile):
            read_all(place)


def padding(file: PackedFile, size: int) -> list[range]:
    """Where bytes mean nothing: between the tensors."""
    places = sorted((entry.offset, entry.offset + entry.num_bytes) for entry in file.entries.values())
    return [range(end, start) for (_, end), (start, _) in zip(places, [*places[1:], (size, size)], strict=True)]


def test_two_writers_beside_each_other_leave_one_whole_file(tmp_path: Path) -> None:
    place = tmp_path / "p.safetensors"
    writers = [PackedWriter(place, 4) for _ in range(2)]
    data = np.arange(100, dtype=np.uint8)
    for writer in writers:
        writer.add("a/dense/weight", "U8", (100,), data)
    for writer in writers:
        writer.finish({"model": "m"})
        writer.drop()
        assert np.array_equal(PackedFile(place).read("a/dense/weight"), data)
    assert list(tmp_path.iterdir()) == [place]


def test_sums_see_every_bit_and_the_order() -> None:
    data = np.random.default_rng(0).integers(0, 256, 3 * 8 * SUMMED + 5, dtype=np.uint8)
    sums = {checksum(data)}
    for at in (0, 8 * SUMMED - 1, 8 * SUMMED, len(data) - 1):
        other = data.copy()
        other[at] ^= 128
        sums.add(checksum(other))
    swapped = data.copy()
    swapped[: 8 * SUMMED], swapped[8 * SUMMED : 16 * SUMMED] = data[8 * SUMMED : 16 * SUMMED], data[: 8 * SUMMED]
    assert len(sums | {checksum(swapped)}) == 6


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """No file can grow larger: as on a full disk, also for what was buffered."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, 9_000, 30_000])
def test_a_writer_on_a_full_disk_goes_without_a_trace(room: int) -> None:
    writer = PackedWriter(packed_folder() / "a.safetensors", len(NAMES))
    with files_up_to(room):
        with pytest.raises(OSError, match="too large"):
            fill(writer)
        writer.drop()
    assert there() == []


def test_what_was_used_longest_ago_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    packed_folder().mkdir(parents=True)
    for age, name in enumerate("abcd"):
        path = packed_folder() / f"{name}.safetensors"
        path.write_bytes(b"x" * 1000)
        os.utime(path, (time.time() - age, time.time() - age))
    monkeypatch.setenv(LIMIT_VARIABLE, "3500")
    make_room(1000)
    assert there() == ["a.safetensors", "b.safetensors"]


def test_what_a_killed_writer_left_goes_and_what_is_being_written_stays() -> None:
    live, killed, fresh = (PackedWriter(packed_folder() / f"{name}.safetensors", 1) for name in ("live", "killed", "fresh"))
    for writer in (live, killed):
        os.utime(writer._scratch, (0, 0))
    for writer in (killed, fresh):
        writer._file.close()  # as the system does for a process that ends, locks included
    make_room(0)
    assert [name.split(".")[0] for name in there()] == ["fresh", "live"], "a new one may not be locked yet"
    live.drop()


def test_the_limit_is_read_and_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packed_limit() == 16 << 30
    for given, limit in (("4GiB", 4 << 30), ("2 MB", 2_000_000), ("1.5g", 1_500_000_000), ("off", 0)):
        monkeypatch.setenv(LIMIT_VARIABLE, given)
        assert packed_limit() == limit
    monkeypatch.setenv(LIMIT_VARIABLE, "lots")
    with pytest.raises(ConfigError, match="BATCHINFER_PACKED_WEIGHTS=lots"):
        packed_limit()


def test_no_room_is_said_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_room(1000)
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: disk._replace(free=5_000_000))
    with pytest.raises(OSError, match=r"3 MB, and .* has 5 MB free"):
        require_room(3_000_000)
    monkeypatch.setenv(LIMIT_VARIABLE, "2MB")
    with pytest.raises(OSError, match="3 MB of at most 2; BATCHINFER_PACKED_WEIGHTS"):
        require_room(3_000_000)


def test_a_file_that_goes_meanwhile_is_no_damage(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    place = written("a")
    monkeypatch.setattr(packed_shelf, "PackedFile", lambda path: (path.unlink(), PackedFile(path)))
    with caplog.at_level(logging.WARNING):
        assert try_open(place) is None
    assert not caplog.text


def test_a_file_that_cannot_be_mapped_stays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    place = written("a")

    def refuse(*given: object, **named: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refuse)
    with caplog.at_level(logging.WARNING):
        assert try_open(place) is None
    assert "cannot be mapped" in caplog.text
    assert there() == ["a.safetensors"]
    assert [kept.model for kept in kept_weights()] == ["?"]
