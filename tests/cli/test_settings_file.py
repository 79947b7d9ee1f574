"""`--config FILE`: keys are long flag names, unknown ones are refused, the command line wins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchinfer.cli.flags import EngineFlags, ModelFlags, parse_count, parse_size
from batchinfer.cli.settings import engine_config
from batchinfer.cli.settings_file import read_settings
from batchinfer.config import EngineConfig
from tests.cli.conftest import Cli
from tests.job.world import read_jsonl, write_jsonl

ROOT = Path(__file__).resolve().parents[2]


def refused(cli: Cli, tmp_path: Path, text: str, *flags: str) -> str:
    """What `run` says about a settings file; the input does not exist, so a good file fails there."""
    path = tmp_path / "s.toml"
    path.write_text(text)
    said = cli("run", "missing.jsonl", "--config", str(path), *flags)
    assert said.code in (1, 2)
    assert len(said.err.strip().splitlines()) == 1
    return said.err


def test_unknown_keys_are_refused_by_name_with_the_nearest(cli: Cli, tmp_path: Path) -> None:
    said = refused(cli, tmp_path, "temprature = 0.5\n")
    assert "unknown key 'temprature'" in said
    assert "'temperature'" in said


def test_values_are_checked_as_the_flags_are(cli: Cli, tmp_path: Path) -> None:
    assert "--block-size 3: must be one of" in refused(cli, tmp_path, "block-size = 3\n")
    assert "is not a whole number" in refused(cli, tmp_path, "max-tokens = 'many'\n")
    assert "must be true or false" in refused(cli, tmp_path, "strict = 1\n")
    assert "not true or false" in refused(cli, tmp_path, "seed = true\n")


def test_the_command_line_wins(cli: Cli, tmp_path: Path) -> None:
    assert "--block-size 5:" in refused(cli, tmp_path, "block-size = 3\n", "--block-size", "5")
    assert "no such file" in refused(cli, tmp_path, "block-size = 3\n", "--block-size", "16")


@pytest.mark.parametrize(
    "in_file, flags, words",
    [
        ('choices = ["a"]', ("--response-format", "json_object"), "both say"),
        ('response-format = "json_object"', ("--choices", "a,b"), "both say"),
        ("num-kv-blocks = 64", ("--kv-cache-memory", "1GB"), "give one of them"),
        ('drop-columns = ["x"]', ("--keep-columns", "y"), "give one of them"),
        ('prompt-column = "x"', ("--prompt-template", "{{ y }}"), "leave --prompt-column"),
        ('prompt-template = "{{ y }}"', ("--messages-column", "x"), "leave --prompt-column"),
    ],
)
def test_the_command_line_wins_over_what_excludes_it(cli: Cli, tmp_path: Path, in_file: str, flags: tuple[str, str], words: str) -> None:
    assert "no such file" in refused(cli, tmp_path, in_file + "\n", *flags)
    both = f"{in_file}\n{flags[0][2:]} = '{flags[1]}'\n"
    assert words in refused(cli, tmp_path, both)


def test_negative_forms_lists_and_tables(cli: Cli, tmp_path: Path) -> None:
    good = 'no-prefix-caching = true\nno-kv-cache = true\npaged = false\nenforce-eager = true\nspeculative = "ngram"\nstop = ["a", "b"]\nstop-token-ids = [1, 2]\nkv-cache-memory = "64MiB"\n[engine]\nmax_num_seqs = 4\n'
    assert "no such file" in refused(cli, tmp_path, good)
    assert "stands there twice" in refused(cli, tmp_path, "seed = 1\n[sampling]\nseed = 2\n")
    assert "one level deep" in refused(cli, tmp_path, "[a.b]\nseed = 2\n")


def test_an_entry_with_a_comma_stays_one_entry(cli: Cli, tmp_path: Path, tiny_folder: Path) -> None:
    assert "keep-columns holds an entry with a comma" in refused(cli, tmp_path, 'keep-columns = ["a", "b, c"]\n')
    (tmp_path / "s.toml").write_text('choices = ["well, yes", "no"]\n')
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"{i}", "temperature": 2.0, "max_tokens": 40} for i in range(20)])
    said = cli("run", source, "-m", tiny_folder, "-q", "-o", tmp_path / "out.jsonl", "--config", tmp_path / "s.toml")
    assert said.code == 0, said.err
    assert {row["generated_text"] for row in read_jsonl(tmp_path / "out.jsonl")} == {"well, yes", "no"}


def test_files_that_cannot_be_read(cli: Cli, tmp_path: Path) -> None:
    assert "not valid TOML" in refused(cli, tmp_path, "a = = b\n")
    said = cli("run", "x.jsonl", "--config", str(tmp_path / "nowhere.toml"))
    assert (said.code, "No such file" in said.err) == (2, True)


def test_the_list_of_model_names_is_not_taken_for_settings(cli: Cli) -> None:
    said = cli("run", "missing.jsonl", "--config", str(ROOT / "configs" / "models.toml"))
    assert said.code == 2
    assert "a list of model names, not of settings" in said.err


@pytest.mark.parametrize(
    "path", sorted(path for path in (ROOT / "configs").glob("*.toml") if path.name != "models.toml"), ids=lambda path: path.name
)
def test_shipped_settings_files_work(cli: Cli, path: Path) -> None:
    assert read_settings(path)
    assert "no such file" in cli("run", "missing.jsonl", "--config", str(path)).err


def test_other_tools_words_for_a_number_format() -> None:
    config = engine_config(ModelFlags(dtype="bfloat16"), EngineFlags(kv_cache_dtype="fp32"))
    assert (config.dtype, config.kv_cache_dtype) == ("bf16", "float32")
    assert engine_config(ModelFlags(dtype="float"), EngineFlags()).dtype == "float32"


def test_every_feature_has_a_switch() -> None:
    """Flags that are given nothing leave every feature as `EngineConfig` has it; each can be turned."""
    assert engine_config(ModelFlags(), EngineFlags()) == EngineConfig()
    names = ("kv_cache", "paged", "prefix_caching", "continuous_batching", "chunked_prefill", "flash_attention")
    for name in names:
        assert engine_config(ModelFlags(), EngineFlags(**{name: False})) == replace(EngineConfig(), **{name: False})
    eager = EngineFlags(enforce_eager=True, speculative="draft:m", num_speculative_tokens=3)
    assert engine_config(ModelFlags(), eager) == replace(EngineConfig(), graphs=False, speculative="draft:m", num_speculative_tokens=3)


def test_sizes_and_counts() -> None:
    assert parse_size("512") == 512
    assert parse_size("1.5GiB") == 3 * 2**29
    assert parse_size("800 MB") == 800_000_000
    assert parse_size("10TB") == 10**13
    assert parse_size("2g") == 2_000_000_000
    assert [parse_count(text) for text in ("7", "1e6", "1_000", "2,000", "-1")] == [7, 1_000_000, 1000, 2000, -1]
