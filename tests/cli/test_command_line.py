"""The command line as such: help, refusals in one line, exit codes, streams."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchinfer.cli.main import with_leading_flags_moved
from batchinfer.errors import is_out_of_memory
from tests.cli.conftest import Cli

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "numpy", "pyarrow", "transformers", "tokenizers", "rich", "tqdm")


def python(*args: str, **more: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *args], text=True, env=environment, capture_output=True, **more)  # type: ignore[call-overload,no-any-return]


def test_the_command_tree_imports_nothing_heavy() -> None:
    shown = python("-c", f"import sys, batchinfer.cli.main; print([m for m in {HEAVY} if m in sys.modules])")
    assert shown.stdout.strip() == "[]", shown.stderr


def test_a_command_line_loads_its_own_command_alone() -> None:
    others = [f"batchinfer.cli.{name}" for name in ("plan", "ablate", "bench", "models", "sweep_kv")]
    script = (
        "import sys; from batchinfer.__main__ import run_command; code = run_command(['doctor', '--version']);"
        f"print(code, [m for m in {others} if m in sys.modules])"
    )
    assert python("-c", script).stdout.splitlines()[-1] == "0 []"


def test_nothing_is_drawn_or_planned_before_the_first_answer(tiny_folder: Path, tmp_path: Path) -> None:
    """What stands on no terminal needs no rich, and a run needs no plan: they would only delay it."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "hello", "max_tokens": 2}\n')
    script = (
        "import sys\n"
        "from batchinfer.reports.faces import PlainFace\n"
        "from batchinfer.__main__ import run_command\n"
        "unneeded = ('rich', 'pyarrow', 'transformers', 'jsonschema', 'batchinfer.cli.plan', 'batchinfer.reports.plan')\n"
        "PlainFace.answer_shown = lambda *given: print([name for name in unneeded if name in sys.modules])\n"
        f"sys.exit(run_command(['run', {str(tmp_path / 'in.jsonl')!r}, '-m', {str(tiny_folder)!r}]))\n"
    )
    shown = python("-c", script)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == "[]\n"


def test_help_shows_the_groups_everyday_ones_first(cli: Cli) -> None:
    said = cli("run", "--help")
    assert said.code == 0
    groups = ["Input", "Output", "Model", "Sampling", "Engine", "Features, one by one", "General"]
    places = [said.out.index(f"─ {group} ─") for group in groups]
    assert places == sorted(places)
    for flag in ("--prompt-column", "--max-tokens", "--kv-cache-memory", "--config", "--version", "--threads"):
        assert flag in said.out
    assert "fake" not in said.out


def test_help_lists_the_commands(cli: Cli) -> None:
    said = cli("--help")
    assert all(name in said.out for name in ("run", "plan", "ablate", "sweep-kv", "bench", "models", "doctor"))


@pytest.mark.parametrize(
    "args",
    [
        ("--version",),
        ("run", "--version"),
        ("doctor", "--version"),
        ("plan", "--version"),
        ("bench", "--version"),
        ("ablate", "--version"),
        ("sweep-kv", "--version"),
    ],
)
def test_version_everywhere(cli: Cli, args: tuple[str, ...]) -> None:
    said = cli(*args)
    assert (said.code, said.out.split()[0]) == (0, "batchinfer")


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--threads 0", "--threads 0: must be from 1 to"),
        ("--block-size 3", "must be one of 16, 32, 64"),
        ("--block-size 0", "must be one of"),
        ("--block-size 8", "must be one of"),
        ("--block-size 1000000", "must be one of"),
        ("--max-num-seqs 0", "must be from 1 to 65,536"),
        ("--concurrency -1", "must be from 1 to 65,536"),
        ("--max-num-seqs 1000000000", "must be from 1 to 65,536"),
        ("--max-num-batched-tokens 0", "must be from 1 to"),
        ("--num-kv-blocks 0", "must be from"),
        ("--max-model-len 1e9", "must be from 1 to"),
        ("--max-tokens 0", "--max-tokens 0 is out of range; must be at least 1"),
        ("--temperature -1", "--temperature -1.0 is out of range"),
        ("--temperature nan", "--temperature nan is out of range"),
        ("--top-p 1.5", "--top-p 1.5 is out of range"),
        ("--top-k -2", "--top-k -2 is out of range"),
        ("--min-p 2", "--min-p 2.0 is out of range"),
        ("--stop-token-ids 1,x", "must be token ids"),
        ("--limit -1", "--limit -1: must be at least 0"),
        ("--limit x", "is not a whole number"),
        ("--kv-cache-memory much", "is not a size"),
        ("--dtype int4", "must be one of auto, bf16, float32"),
        ("--quantization fp8", "not supported by this version"),
        ("--quantization int2", "must be one of none, int8, int4"),
        ("--kv-cache-dtype int4", "must be one of auto, bf16, float32, int8"),
        ("--kv-cache-dtype fp8", "not supported by this version"),
        ("--order global", "not supported by this version"),
        ("--speculative draft:", "must be off, ngram, or draft:MODEL"),
        ("--speculative medusa", "must be off, ngram, or draft:MODEL"),
        ("--num-speculative-tokens 0", "--num-speculative-tokens 0: must be from 1 to 64"),
        ("--response-format @s.json", "--response-format @s.json: cannot be read"),
        ("--no-such-flag", "No such option"),
        ("--num-kv-blocks 8 --kv-cache-memory 1GB", "give one of them"),
    ],
)
def test_wrong_settings_are_one_line_and_exit_2(cli: Cli, tmp_path: Path, flags: str, words: str) -> None:
    given = tmp_path / "in.jsonl"
    given.write_text('{"prompt": "x"}\n')
    said = cli("run", str(given), *flags.split())
    assert said.code == 2
    assert words in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert not said.out


@pytest.mark.parametrize(
    "line, help_of",
    [
        ("run x.jsonl --max-tokens", "batchinfer run"),
        ("bench --workload", "batchinfer bench"),
        ("--threads 1 run --dtype", "batchinfer run"),
        ("models pull --revision", "batchinfer models pull"),
        ("models pull", "batchinfer models pull"),
        ("run x --nothing-such", "batchinfer run"),
        ("walk", "batchinfer"),
    ],
)
def test_a_usage_error_points_to_the_help_of_its_command(cli: Cli, line: str, help_of: str) -> None:
    said = cli(*line.split())
    assert said.code == 2
    assert said.err.rstrip().endswith(f"(see {help_of} --help)")
    assert len(said.err.strip().splitlines()) == 1


def test_no_input_is_said_with_the_way_out(cli: Cli) -> None:
    said = cli("run")
    assert said.code == 2
    assert "prompts.jsonl" in said.err


def test_a_missing_file_is_named(cli: Cli) -> None:
    said = cli("run", "no-such-file.jsonl")
    assert said.code in (1, 2)
    assert said.err.strip() == "batchinfer: no-such-file.jsonl: no such file"


def test_general_flags_may_stand_before_the_command() -> None:
    assert with_leading_flags_moved(["--threads", "2", "--config=a.toml", "run", "x"]) == ["run", "--threads", "2", "--config=a.toml", "x"]
    assert with_leading_flags_moved(["run", "--threads", "2"]) == ["run", "--threads", "2"]
    assert with_leading_flags_moved(["--version"]) == ["--version"]


def test_running_out_of_memory_is_known_from_other_errors() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(ImportError("libx.so: failed to map segment from shared object"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def test_a_reader_that_goes_away_ends_quietly(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)  # nobody will read
    shown = subprocess.run(
        [sys.executable, "-m", "batchinfer", "models", "list"],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        check=False,
    )
    os.close(write_end)
    assert shown.returncode == 141
    assert shown.stderr == ""


def test_closed_streams_do_no_harm(tmp_path: Path) -> None:
    shown = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m batchinfer run nothing.jsonl <&- >&- 2>&-"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        check=False,
    )
    assert shown.returncode in (1, 2)


def test_module_and_function_are_the_same_program() -> None:
    assert python("-m", "batchinfer", "--version").stdout.startswith("batchinfer ")
