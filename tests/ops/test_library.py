"""The native library: which variant is built, what the cache keeps, and that every failure is a reason, never an exception."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from batchinfer.errors import ConfigError
from batchinfer.ops.native import library
from batchinfer.ops.native.library import AMX, AVX2, AVX512, KEPT, best_variant, load_native

needs_a_compiler = pytest.mark.skipif(
    best_variant() is None or shutil.which("g++") is None, reason="needs g++ and a processor with AVX2 or AVX-512"
)
needs_amx = pytest.mark.skipif(best_variant() is not AMX or load_native().variant != "amx", reason="needs AMX")
ANSWER = 'extern "C" int answer() {\n#ifdef __AVX512F__\nreturn 512;\n#else\nreturn 256;\n#endif\n}\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of small sources in place of the package's, and an empty cache."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.cpp").write_text(ANSWER)
    (folder / "other.cpp").write_text('#include "vector.h"\nextern "C" int other() { return kOther; }\n')
    (folder / "vector.h").write_text("constexpr int kOther = 7;\n")
    monkeypatch.setattr(library, "FOLDER", folder)
    monkeypatch.setenv("BATCHINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BATCHINFER_NATIVE", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    library._load.cache_clear()
    yield folder
    library._load.cache_clear()


def loaded() -> ctypes.CDLL:
    native = load_native()
    assert native.library is not None, native.reason
    return native.library


def built(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "native").iterdir())


@needs_a_compiler
def test_every_source_is_built_and_the_result_is_kept(sources: Path, tmp_path: Path) -> None:
    first = load_native()
    assert (loaded().answer(), loaded().other()) == (256 if first.variant == "avx2" else 512, 7)
    assert first.reason == f"built with g++ for {first.target}"
    (path,) = built(tmp_path)
    written = path.stat().st_ino
    library._load.cache_clear()
    assert load_native().variant == first.variant
    assert [place.stat().st_ino for place in built(tmp_path)] == [written]  # nothing was built again, nothing left behind


@needs_a_compiler
def test_the_variant_for_avx2_is_there_on_request(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded()
    monkeypatch.setenv("BATCHINFER_NATIVE", "AVX2")
    native = load_native()
    assert (native.variant, native.target, loaded().answer()) == ("avx2", "AVX2", 256)
    assert any(path.name.startswith("batchinfer-avx2-") for path in built(tmp_path))


@needs_amx
def test_amx_is_chosen_where_it_is_there_and_avx512_on_request(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_amx = load_native()
    assert with_amx.variant == "amx"
    assert with_amx.target.startswith("AVX-512 (")
    assert with_amx.target.endswith(", AMX)")
    monkeypatch.setenv("BATCHINFER_NATIVE", "avx512")
    without = load_native()
    assert (without.variant, loaded().answer()) == ("avx512", 512)
    assert without.target == with_amx.target.replace(", AMX", "")
    assert without.reason == f"built with g++ for {without.target}"
    assert {path.name.split("-")[1] for path in built(tmp_path)} == {"amx", "avx512"}


@needs_amx
def test_where_amx_is_refused_avx512_takes_over_and_the_reason_says_why(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "why_not_permitted", lambda: "the system does not permit it (Invalid argument)")
    native = load_native()
    assert native.library is not None
    assert (native.variant, "AMX" in native.target) == ("avx512", False)
    assert native.reason == f"built with g++ for {native.target}, without AMX: the system does not permit it (Invalid argument)"
    monkeypatch.undo()
    monkeypatch.setattr(library, "FOLDER", sources)
    monkeypatch.setenv("BATCHINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "AMX", replace(AMX, flags=(*AMX.flags, "-mno-such-flag")))
    monkeypatch.setattr(library, "VARIANTS", (library.AMX, AVX512, AVX2))
    native = load_native()
    assert native.variant == "avx512"
    assert "without AMX: g++ failed: " in native.reason


def test_without_amx_nothing_is_asked_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATCHINFER_NATIVE", raising=False)
    monkeypatch.setattr(library, "has_amx", lambda: False)
    monkeypatch.setattr(library, "why_not_permitted", lambda: pytest.fail("asked"))
    assert best_variant() in (AVX512, AVX2, None)
    assert load_native().variant in ("avx512", "avx2", None)


def test_avx512_is_refused_where_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHINFER_NATIVE", "avx512")
    monkeypatch.setattr(library, "best_variant", lambda: AVX2)
    native = load_native()
    assert (native.library, native.reason) == (None, "this processor has no AVX-512, which BATCHINFER_NATIVE asks for")


@needs_a_compiler
def test_a_changed_header_is_another_library(sources: Path, tmp_path: Path) -> None:
    loaded()
    (sources / "vector.h").write_text("constexpr int kOther = 8;\n")
    library._load.cache_clear()
    assert loaded().other() == 8
    assert len(built(tmp_path)) == 2


@needs_a_compiler
def test_the_cache_keeps_a_few_and_nothing_of_others_is_deleted(sources: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "native"
    folder.mkdir(parents=True)
    old = [folder / f"batchinfer-avx2-{number}.so" for number in range(KEPT + 3)]
    for age, path in enumerate((*old, folder / "batchinfer.txt", folder / "other.so")):
        path.write_bytes(b"")
        os.utime(path, (1000 - age, 1000 - age))
    loaded()
    left = {path.name for path in built(tmp_path)}
    assert {"batchinfer.txt", "other.so"} <= left
    assert {path.name for path in old} & left == {path.name for path in old[: KEPT - 1]}


@pytest.mark.parametrize("value", ["0", "avx", "AVX-512", "amx"])
def test_a_value_that_means_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("BATCHINFER_NATIVE", value)
    with pytest.raises(ConfigError, match=f"BATCHINFER_NATIVE={value.lower()}: must be on, off, avx512 or avx2"):
        load_native()


def test_off_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHINFER_NATIVE", "Off")
    native = load_native()
    assert (native.library, native.variant, native.reason) == (None, None, "switched off by BATCHINFER_NATIVE")


@needs_a_compiler
def test_failures_are_reasons(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sources / "answer.cpp").write_text("this is no C++\n")
    native = load_native()
    assert native.library is None
    assert "g++ failed: " in native.reason
    assert "error" in native.reason
    assert built(tmp_path) == []
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    assert "could not be built or loaded" in load_native().reason
    monkeypatch.setenv("CXX", "g++ -mno-avx2")
    monkeypatch.setenv("BATCHINFER_NATIVE", AVX2.name)
    assert "knows no __AVX2__" in load_native().reason
