"""`run`, `plan`, `bench` and `doctor` on a tiny model, as a user starts them."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from batchinfer.config import cache_root
from batchinfer.ops.native.library import load_native
from batchinfer.reports.doctor import large_pages, unusable_gpu
from tests.cli.conftest import Cli

ROOT = Path(__file__).resolve().parents[2]
REPORT_KEYS = {
    "rows", "tokens", "seconds", "throughput", "limit_fraction", "host_ms_per_step", "preemptions", "prefix_hit_rate",
    "finish_reasons", "peak_rss_mb", "settings", "versions", "machine",
}  # fmt: skip


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": i, "prompt": f"Say something about {i}.", "max_tokens": 4} for i in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"id": 5, "prompt": "twice", "temperature": "hot"}\nnot json\n')
    return path


def check_keys(document: dict[str, object]) -> None:
    assert set(document) >= REPORT_KEYS
    assert set(document["rows"]) >= {"total", "ok", "failed"}  # type: ignore[call-overload]
    assert set(document["tokens"]) >= {"prompt", "cached_prompt", "output"}  # type: ignore[call-overload]
    assert set(document["seconds"]) >= {"wall", "start", "load", "prefill", "decode", "sample", "io"}  # type: ignore[call-overload]
    assert set(document["throughput"]) >= {"output_tokens_per_s", "total_tokens_per_s"}  # type: ignore[call-overload]


def test_a_run_writes_results_a_report_and_a_verdict(cli: Cli, prompts: Path, tiny_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    said = cli("run", prompts, "-m", tiny_folder, "-o", output, "--threads", "1")
    assert said.code == 3
    assert not said.out
    assert said.err.endswith("6 succeeded, 2 failed\n")
    assert "\x1b" not in said.err
    for words in ("first prompt, as the model sees it", "first answer (row ", "physical limit", "temperature 0", "max_tokens, temperature"):
        assert words in said.err
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["error"] is None for row in rows] == [True] * 6 + [False] * 2
    report = json.loads(Path(f"{output}.report.json").read_text())
    check_keys(report)
    assert report["rows"] == {"total": 8, "ok": 6, "failed": 2, "clipped": 0, "truncated": 0, "skipped": 0}
    assert report["tokens"]["output"] == 24
    assert report["settings"]["threads"] == 1
    assert report["limit_fraction"] > 0
    assert report["error_codes"] == {"invalid_json": 1, "invalid_parameter": 1}


def test_quiet_says_only_the_verdict(cli: Cli, prompts: Path, tiny_folder: Path, tmp_path: Path) -> None:
    said = cli("run", prompts, "-m", tiny_folder, "-o", tmp_path / "out.jsonl", "-q")
    assert said.err == "6 succeeded, 2 failed\n"


def test_a_mistyped_column_is_said_even_with_quiet(cli: Cli, prompts: Path, tiny_folder: Path, tmp_path: Path) -> None:
    said = cli("run", prompts, "-m", tiny_folder, "-o", tmp_path / "out.jsonl", "-q", "--keep-columns", "id,promt")
    assert said.err == "warning: --keep-columns promt: no such column in the first 8 rows\n6 succeeded, 2 failed\n"


def test_what_becomes_of_prompts_is_said_as_it_is(cli: Cli, tiny_folder: Path, tmp_path: Path) -> None:
    def told(row: dict[str, object], *flags: str) -> str:
        (tmp_path / "in.jsonl").write_text(json.dumps({**row, "max_tokens": 2}) + "\n")
        said = cli("plan", tmp_path / "in.jsonl", "-m", tiny_folder, *flags)
        assert said.code == 0, said.err
        return next(line for line in said.err.splitlines() if line.startswith("prompts: "))

    messages = [{"role": "user", "content": "hello"}]
    assert told({"messages": messages}) == "prompts: 'messages', rendered through the chat template"
    assert told({"prompt": "hello"}) == "prompts: 'prompt', each becomes one user message (--no-chat sends it raw)"
    assert told({"prompt": "hello"}, "--no-chat") == "prompts: 'prompt', sent raw (--chat wraps it)"
    assert told({"prompt_token_ids": [1, 2]}) == "prompts: 'prompt_token_ids', used as they are"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": messages}}
    assert "OpenAI lines" in told(line)


def test_settings_of_a_file_reach_the_job(cli: Cli, prompts: Path, tiny_folder: Path, tmp_path: Path) -> None:
    settings = tmp_path / "s.toml"
    settings.write_text(
        f"model = {str(tiny_folder)!r}\nlimit = 2\nmax-num-seqs = 3\n[sampling]\nmax-tokens = 2\nno-skip-special-tokens = true\n"
    )
    output = tmp_path / "out.jsonl"
    assert cli("--config", settings, "run", prompts, "-o", output, "-q", "--no-row-params").code == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["num_generated_tokens"] for row in rows] == [2, 2]
    assert json.loads(Path(f"{output}.report.json").read_text())["settings"]["max_num_seqs"] == 3


def test_stdout_holds_nothing_but_results_under_any_locale(prompts: Path, tiny_folder: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "batchinfer", "run", str(prompts), "-m", str(tiny_folder), "-o", "-", "--threads", "1"],
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG"))},
            "PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "FORCE_COLOR": "1",
        },
        capture_output=True,
        check=False,
    )  # fmt: skip
    assert shown.returncode == 3
    assert [json.loads(line)["id"] if b'"id"' in line else None for line in shown.stdout.splitlines()] == [0, 1, 2, 3, 4, 5, 5, None]
    assert b"\x1b" not in shown.stderr


def test_a_terminal_gets_the_panel(prompts: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """Under a pseudo-terminal the prompt and the answer are shown in boxes and the end report stands at the end."""
    leader, follower = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "batchinfer",
        "run",
        str(prompts),
        "-m",
        str(tiny_folder),
        "-o",
        str(tmp_path / "o.jsonl"),
        "--threads",
        "1",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(command, stderr=follower, stdout=subprocess.DEVNULL, env=environment) as process:
        os.close(follower)
        shown = b""
        while process.poll() is None or select.select([leader], [], [], 0)[0]:
            if select.select([leader], [], [], 0.2)[0]:
                try:
                    shown += os.read(leader, 65536)
                except OSError:  # the other side is closed
                    break
    os.close(leader)
    text = shown.decode()
    assert "first prompt, as the model sees it" in text
    assert "╭─" in text
    assert "6 succeeded, 2 failed" in text


def test_plan_checks_rows_and_runs_nothing(cli: Cli, prompts: Path, tiny_folder: Path, tmp_path: Path) -> None:
    said = cli("plan", prompts, "-m", tiny_folder, "--json", tmp_path / "plan.json")
    assert said.code == 3
    assert said.err.endswith("6 rows can run, 2 cannot\n")
    for words in (
        "first prompt, as the model sees it",
        "duplicate ids",
        "invalid_parameter: 1 row: row 6; first: ",
        "all 6 rows fit at once",
        "KV pool",
        "at least",
    ):
        assert words in said.err
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["rows"] == {"total": 8, "ok": 6, "failed": 2, "clipped": 0}
    assert found["duplicate_ids"] == {"count": 1, "first": ["5"]}
    assert found["tokens"]["output_at_most"] == 24
    assert found["fit"]["pool_tokens"] > 0
    assert not list(tmp_path.glob("*.out.*"))
    dry = cli("run", prompts, "-m", tiny_folder, "--dry-run")
    assert dry.code == 3
    assert dry.err.endswith("6 rows can run, 2 cannot\n")


def test_plan_of_good_rows_exits_0(cli: Cli, prompts: Path, tiny_folder: Path) -> None:
    assert cli("plan", prompts, "-m", tiny_folder, "--limit", "5", "-q").err == "5 rows can run, 0 cannot\n"


def test_bench_reports_the_stable_keys(cli: Cli, tiny_folder: Path, tmp_path: Path) -> None:
    said = cli("bench", "-m", tiny_folder, "--rows", "6", "--concurrency", "4", "--threads", "1", "--json", tmp_path / "b.json")
    assert said.code == 0, said.err
    found = json.loads((tmp_path / "b.json").read_text())
    check_keys(found)
    assert found["rows"]["ok"] == 6
    assert found["settings"]["max_num_seqs"] == 4
    assert set(found["itl_ms"]) == {"p50", "p90", "p99"}
    assert not found["interrupted"]
    assert "6 rows, " in said.err
    assert f"{found['tokens']['output']:,} output tokens" in said.err
    assert "physical limit" in said.err


def test_bench_that_is_interrupted_reports_what_it_measured(cli: Cli, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(monkeypatch, 5)
    said = cli("bench", "-m", tiny_folder, "--rows", "6", "--concurrency", "2", "--threads", "1", "--json", "-")
    assert said.code == 130
    assert "stopped by SIGINT after" in said.err
    assert "tokens a second" in said.err
    found = json.loads(said.out)
    assert found["interrupted"]
    assert found["steps"] == 5


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Ctrl-C once so many steps are done."""
    from batchinfer.engine import Engine

    step = Engine.step

    def interrupted(engine: Engine) -> object:
        if engine.stats.steps == steps:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)


def test_bench_runs_a_workload_file(cli: Cli, tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(
        '{"id": "a", "prompt_token_ids": [1, 2, 3], "prompt": "ignored", "max_tokens": 3, "ignore_eos": true}\n'
        '{"id": "b", "system": "Be short.", "prompt": "Hello", "max_tokens": 5, "ignore_eos": true}\n'
    )
    said = cli("bench", "-m", tiny_folder, "--workload", path, "--json", "-", "--threads", "1")
    assert said.code == 0, said.err
    assert json.loads(said.out)["tokens"]["output"] == 8


def test_bench_names_a_bad_workload_row(cli: Cli, tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"prompt_token_ids": [1]}\n{"text": "x"}\n')
    said = cli("bench", "-m", tiny_folder, "--workload", path, "--quiet")
    assert said.code == 0
    assert "1 row of " in said.err
    assert "is left out; the first: line 2: no prompt" in said.err
    path.write_text('{"text": "x"}\n')
    said = cli("bench", "-m", tiny_folder, "--workload", path)
    assert said.code != 0
    assert "no column" in said.err or "no rows that can run" in said.err


def test_host_cost_is_printed_and_scaled(cli: Cli, tiny_folder: Path, tmp_path: Path) -> None:
    args = ("-m", tiny_folder, "--fake-model", "--max-model-len", "512", "--json", tmp_path / "h.json")
    assert cli("bench", *args, "--concurrency", "8").code == 2
    model = write_long_context(tiny_folder, tmp_path / "long")
    said = cli("bench", "-m", model, "--fake-model", "--concurrency", "64", "--json", tmp_path / "h.json")
    assert said.code == 0, said.err
    cost = json.loads((tmp_path / "h.json").read_text())["host_cost"]
    assert cost["concurrency"] == 64
    assert cost["pool_full"]
    assert cost["preemptions"] == 0
    assert 0 < cost["pure_decode_ms"] < cost["steady_ms"]
    assert "target" in said.err


def write_long_context(tiny_folder: Path, folder: Path) -> Path:
    """The tiny model with a context that the churn mix fits in; its weights are never read."""
    folder.mkdir()
    for path in tiny_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    return folder


def test_doctor_looks_everywhere(cli: Cli) -> None:
    said = cli("doctor", "--threads", "1")
    assert said.code == 0
    for words in (
        *("machine", "versions", "devices", "number format", "native library", "kernels, bf16", "kernels, float32", "caches"),
        *("kernels, --quantization int8", "kernels, --quantization int4", "exact sums", "large pages", "attention", "sampling"),
        *("self-test", "memory", "torch", "plain torch, slower" if load_native().library is None else "native library (built with"),
    ):
        assert words in said.out
    assert "asked for" not in said.out.replace("1 threads asked for", "")


def test_doctor_says_why_the_native_library_is_not_used(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHINFER_NATIVE", "off")
    said = cli("doctor")
    assert "plain torch, slower (switched off by BATCHINFER_NATIVE)" in said.out
    assert "PROBLEM" not in said.out
    monkeypatch.delenv("BATCHINFER_NATIVE")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "PROBLEM: the native library is not used, which makes a run several times slower: " in cli("doctor").out


def test_the_variant_in_use_is_told_and_a_wrong_switch_refused(
    cli: Cli, prompts: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if load_native().library is None:
        pytest.skip(load_native().reason)
    monkeypatch.setenv("BATCHINFER_NATIVE", "avx2")
    assert "native library (built with g++ for AVX2)" in cli("doctor").out
    assert cli("run", prompts, "-m", tiny_folder, "-o", tmp_path / "out.jsonl", "-q").code == 3
    settings = json.loads((tmp_path / "out.jsonl.report.json").read_text())["settings"]
    assert (settings["native"], settings["attention"]) == ("AVX2", "native")
    monkeypatch.setenv("BATCHINFER_NATIVE", "maybe")
    assert "PROBLEM: BATCHINFER_NATIVE=maybe: must be on, off, avx512 or avx2" in cli("doctor").out
    said = cli("run", prompts, "-m", tiny_folder, "-o", tmp_path / "other.jsonl", "-q")
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "BATCHINFER_NATIVE=maybe" in said.err


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_fewer_bits_run_and_are_in_the_report(cli: Cli, prompts: Path, tiny_folder: Path, tmp_path: Path, quantization: str) -> None:
    output = tmp_path / "out.jsonl"
    flags = ("-m", tiny_folder, "--quantization", quantization, "--kv-cache-dtype", "int8", "--limit", "6")
    said = cli("run", prompts, "-o", output, *flags)
    assert said.code == 0, said.err
    assert f"quantization: {quantization} (asked for; " in said.err
    assert "KV dtype: int8 (asked for; " in said.err
    report = json.loads(Path(f"{output}.report.json").read_text())
    assert (report["settings"]["quantization"], report["settings"]["kv_cache_dtype"]) == (quantization, "int8")
    assert report["limit"]["attention_flops_per_s"] > 0
    said = cli("plan", prompts, *flags, "--json", "-")
    fit = json.loads(said.out)["fit"]
    assert (fit["quantization"], fit["kv_cache_dtype"]) == (quantization, "int8")
    plain = json.loads(cli("plan", prompts, "-m", tiny_folder, "--limit", "6", "--json", "-").out)["fit"]
    assert fit["weight_bytes"] < plain["weight_bytes"]
    assert fit["kv_bytes_per_token"] < plain["kv_bytes_per_token"]
    refused = cli("run", prompts, "-o", output, "-m", tiny_folder, "--limit", "6")
    assert refused.code == 2
    assert f'--quantization was "{quantization}", is "none"' in refused.err


def test_what_8_bits_would_gain_is_said_where_they_would(cli: Cli, prompts: Path, tiny_folder: Path, tmp_path: Path) -> None:
    for times, words in ((1.84, "--quantization int8 multiplies 1.8x as fast here with "), (1.02, None)):
        assert cli("run", prompts, "-m", tiny_folder, "-o", tmp_path / f"{times}.jsonl", "--limit", "2").code == 0
        remembered = list((cache_root() / "int8-gain").glob("*.json"))
        assert remembered
        for path in remembered:
            path.write_text(json.dumps({"value": times}))
        said = cli("run", prompts, "-m", tiny_folder, "-o", tmp_path / f"{times} again.jsonl", "--limit", "2")
        assert ("quantization: none (" in said.err) == (words is not None)
        assert words is None or words in said.err


def test_large_pages_are_told_as_the_system_has_them(tmp_path: Path) -> None:
    setting = tmp_path / "enabled"
    for line, word in (
        ("[always] madvise never", "always"),
        ("always [madvise] never", "asks for them"),
        ("always madvise [never]", "slower"),
    ):
        setting.write_text(line + "\n")
        assert word in large_pages(setting)
    assert "does not say" in large_pages(tmp_path / "nowhere")


def test_a_gpu_that_torch_was_not_built_for_is_told_from_one_that_works() -> None:
    built_for = ["sm_75", "sm_80", "sm_90", "compute_90"]
    assert unusable_gpu("sm_89", built_for) is None  # runs the kernels of sm_80
    assert unusable_gpu("sm_120", built_for) is None  # compiled from compute_90
    assert "sm_61" in (unusable_gpu("sm_61", built_for) or "")
