"""The measuring itself, with one-liners in place of engines: what is run, what is read, what is shown when something fails."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from batchinfer.machine import Machine
from tests.peers import __main__ as command_line
from tests.peers.engines import Command, Engine, core_list, openvino_engine, openvino_weights, package_versions, vllm_engine
from tests.peers.jobs import Figure, Job, WrongRows, read_rows, write_job
from tests.peers.measure import Measurement, Outcome, count_valid, execute, measure
from tests.peers.schemas import SCHEMAS
from tests.peers.table import BEGIN, END, markdown, put_into

MACHINE = Machine("Linux 6 x86_64", "A CPU", 2, (), 23.5, "3.11.7")
ROW = {"id": "a", "prompt": "hello", "prompt_token_ids": [1, 2, 3], "max_tokens": 5, "ignore_eos": True, "temperature": 0}
SCHEMA = SCHEMAS["a person"]
PERSON = {"name": "Ada", "age": 36, "town": "London", "married": True}


def answers_with(**line: Any) -> str:
    return f"print('starting up'); print({json.dumps(line)!r})"


def engine_of(script: str | Callable[[Job, Path], str], name: str = "peer", weights: str = "int8", ours: bool = False) -> Engine:
    def command(job: Job, files: Path) -> Command:
        answers = files.with_suffix(".jsonl") if job.figure is Figure.VALID_ANSWERS else None
        return Command([sys.executable, "-c", script if isinstance(script, str) else script(job, files)], answers=answers)

    return Engine(name, weights, ours, command, lambda: {"peer": "1.2"})


def job_in(folder: Path, figure: Figure = Figure.TOKENS, rows: int = 4, **extra: Any) -> Job:
    return write_job(folder / f"{figure.name.lower()}.jsonl", figure, [{**ROW, **extra}] * rows)


def measured(folder: Path, engines: Sequence[Engine], jobs: Sequence[Job], rounds: int = 1, timeout_s: float = 30.0) -> Measurement:
    work = Measurement(engines, jobs, rounds, [engine.versions() for engine in engines])
    measure(work, job_in(folder, Figure.FIRST_ANSWER, rows=1), folder, timeout_s, lambda outcome: None)
    return work


def by_job(tokens: int, seconds: float) -> Callable[[Job, Path], str]:
    """A script of an engine that generates so many tokens a row."""
    return lambda job, files: answers_with(seconds=seconds, output_tokens=tokens * job.rows, rows=job.rows)


def test_figures_come_from_the_json_lines_of_stdout(tmp_path: Path) -> None:
    script = lambda job, files: "import time; time.sleep(0.2); " + by_job(5, 0.5)(job, files)  # noqa: E731
    jobs = [job_in(tmp_path), job_in(tmp_path, Figure.FIRST_ANSWER, rows=1), job_in(tmp_path, Figure.WHOLE_JOB)]
    work = measured(tmp_path, [engine_of(script)], jobs)
    assert work.values(0, jobs[0]) == [40.0]  # 20 tokens in half a second
    [first], [whole] = work.values(0, jobs[1]), work.values(0, jobs[2])
    assert 0.2 <= first <= whole + 1
    assert work.outcomes[-1].value == work.outcomes[-1].wall_s


def test_engines_take_turns_after_one_untimed_start_each(tmp_path: Path) -> None:
    jobs = [job_in(tmp_path), job_in(tmp_path, Figure.WHOLE_JOB)]
    work = measured(tmp_path, [engine_of(by_job(5, 1)), engine_of(by_job(5, 2))], jobs, rounds=2)
    order = [(outcome.round, outcome.job, outcome.engine) for outcome in work.outcomes]
    one_round = [("tokens", 0), ("tokens", 1), ("whole_job", 0), ("whole_job", 1)]
    assert order == [(0, "first_answer", 0), (0, "first_answer", 1), *((r, *what) for r in (1, 2) for what in one_round)]
    assert work.ratio(1, 0, jobs[0]) == 0.5


def test_a_failure_is_shown_with_its_last_line_and_the_others_go_on(tmp_path: Path) -> None:
    def broken(job: Job, files: Path) -> str:
        return by_job(5, 1)(job, files) if job.figure is Figure.FIRST_ANSWER else "raise RuntimeError('no memory | left')"

    job = job_in(tmp_path)
    work = measured(tmp_path, [engine_of(broken, "broken"), engine_of(by_job(5, 0.1))], [job], rounds=2)
    assert work.error(0, job) == "exit code 1: RuntimeError: no memory | left"
    assert [outcome.engine for outcome in work.outcomes if outcome.round] == [0, 1, 1]  # not tried again
    table = markdown(work, MACHINE, "2026-12-01")
    assert "| broken | int8 | failed [1] |" in table
    assert "[1] broken (int8), tokens: exit code 1: RuntimeError: no memory / left" in table
    assert "| peer | int8 | 200 (200 to 200) |" in table


def test_an_engine_that_does_not_start_is_tried_on_nothing_and_shown_everywhere(tmp_path: Path) -> None:
    missing = Engine("gone", "bf16", False, lambda job, files: Command([str(tmp_path / "nothing")]), dict)
    jobs = [job_in(tmp_path), job_in(tmp_path, Figure.WHOLE_JOB)]
    work = measured(tmp_path, [missing], jobs)
    assert len(work.outcomes) == 1
    table = markdown(work, MACHINE, "2026-12-01")
    assert "| gone | bf16 | failed [1] | failed [1] |" in table
    assert "gone (bf16), at its first start: [Errno 2]" in table


def test_a_run_that_takes_too_long_is_stopped_with_all_its_processes(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('waiting for', child.pid, file=sys.stderr, flush=True); time.sleep(60)"
    )
    began = time.perf_counter()
    ended = execute(Command([sys.executable, "-c", script]), tmp_path / "slow", timeout_s=2)
    assert ended.timed_out
    assert time.perf_counter() - began < 30
    child = int(ended.last_line.removeprefix("waiting for "))
    deadline = time.perf_counter() + 10
    while is_running(child) and time.perf_counter() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ctrl_c_ends_the_engine_that_runs_and_keeps_what_was_measured(tmp_path: Path) -> None:
    def script(job: Job, files: Path) -> str:
        if job.figure is not Figure.WHOLE_JOB:
            return by_job(5, 1)(job, files)
        note = f"open({str(tmp_path / 'process')!r}, 'w').write(str(os.getpid()))"
        return f"import os, signal, time; {note}; os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"

    jobs = [job_in(tmp_path), job_in(tmp_path, Figure.WHOLE_JOB)]
    work = measured(tmp_path, [engine_of(script)], jobs)
    assert work.interrupted
    assert not is_running(int((tmp_path / "process").read_text()))
    table = markdown(work, MACHINE, "2026-12-01")
    assert "one round, interrupted" in table
    assert "| peer | int8 | 20.0 | not measured |" in table


def test_too_slow_is_a_failure_that_says_so(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    slow = engine_of("import sys, time; print('loading', file=sys.stderr, flush=True); time.sleep(30)")
    work = measured(tmp_path, [slow], [job], timeout_s=1)
    assert work.error(0, job) == "stopped after 1 s; its last line: loading"


def test_another_number_of_tokens_is_a_failure(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    work = measured(tmp_path, [engine_of(lambda job, files: by_job(5 if job.rows == 1 else 4, 1)(job, files))], [job])
    assert work.error(0, job) == "generated 16 tokens where the rows ask for 20"


def test_equal_counts_are_said_once_and_others_by_engine(tmp_path: Path) -> None:
    fixed, free = job_in(tmp_path), job_in(tmp_path, Figure.WHOLE_JOB, ignore_eos=False)
    assert free.output_tokens is None
    engines = [engine_of(by_job(5, 1), "one"), engine_of(lambda job, files: by_job(5 if job.output_tokens else 3, 1)(job, files), "two")]
    table = markdown(measured(tmp_path, engines, [fixed, free]), MACHINE, "2026-12-01")
    assert "Output tokens of tokens: 20, the same of every engine." in table
    assert "Output tokens of whole_job: one (int8) 20; two (int8) 12." in table


def test_answers_count_when_they_fit_their_schema(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    texts = [json.dumps(PERSON), json.dumps(PERSON | {"age": 700}), '{"name": "Ada', None]
    file.write_text("".join(json.dumps({"generated_text": text}) + "\n" for text in texts))
    assert count_valid(file, [SCHEMA] * 4) == 1
    with pytest.raises(ValueError, match="4 answers to 3 rows"):
        count_valid(file, [SCHEMA] * 3)


def test_valid_answers_a_second_is_the_figure_of_a_schema_job(tmp_path: Path) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    job = job_in(tmp_path, Figure.VALID_ANSWERS, ignore_eos=False, response_format=form)

    def script(job: Job, files: Path) -> str:
        rows = [{"generated_text": json.dumps(PERSON) if row else "{"} for row in range(job.rows)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        return f"open({str(files) + '.jsonl'!r}, 'w').write({text!r}); {by_job(5, 0.5)(job, files)}"

    work = measured(tmp_path, [engine_of(script)], [job])
    assert work.values(0, job) == [6.0]
    assert "20, 3 of 4 answers valid" in markdown(work, MACHINE, "2026-12-01")


def test_ratios_are_between_engines_with_the_same_weights(tmp_path: Path) -> None:
    jobs = [job_in(tmp_path), job_in(tmp_path, Figure.WHOLE_JOB)]
    engines = [engine_of("", "ours", "int8", True), engine_of("", "ours", "bf16", True), engine_of("", "theirs", "int8")]
    work = Measurement(engines, jobs, 3, [{}] * 3)
    for round_number, speed in enumerate((1.0, 3.0, 2.0), 1):
        for engine, value in ((0, 20 * speed), (1, 7.0), (2, 10.0)):
            work.outcomes.append(Outcome(engine, "tokens", round_number, "", 1.0, value))
            work.outcomes.append(Outcome(engine, "whole_job", round_number, "", 1.0, value))
    table = markdown(work, MACHINE, "2026-12-01")
    assert "ours against theirs, both int8, median of the rounds' ratios: tokens 4.00x, whole_job 0.25x." in table
    assert "both bf16" not in table
    assert "| ours | int8 | 40.0 (20.0 to 60.0) |" in table


def test_the_table_goes_between_the_marks_and_nowhere_else() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert put_into(text, "new\n") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert put_into(put_into(text, "new\n"), "new\n") == put_into(text, "new\n")
    with pytest.raises(ValueError, match="peers: begin"):
        put_into("no marks", "new")


def test_the_readme_has_the_marks() -> None:
    assert "new" in put_into((Path(command_line.__file__).parents[2] / "README.md").read_text(encoding="utf-8"), "new")


def test_peers_run_their_own_python_without_settings_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    python, job = tmp_path / "bin" / "python", job_in(tmp_path)
    command = vllm_engine(python, tmp_path / "model", 8).command(job, tmp_path / "out")
    assert command.argv[0] == str(python)
    assert "--max-num-seqs 8 --max-model-len 2048 --warm-up" in command.line
    assert not {"OMP_NUM_THREADS", "PYTHONPATH"} & set(command.environment)
    assert command.environment["LD_PRELOAD"].endswith(str(tmp_path / "lib" / "libiomp5.so"))
    assert command.environment["VLLM_CPU_OMP_THREADS_BIND"] == core_list(os.sched_getaffinity(0))
    assert str(tmp_path) not in command.short_line
    start = openvino_engine(python, tmp_path, 8).command(job_in(tmp_path, Figure.FIRST_ANSWER), tmp_path / "out")
    assert "--warm-up" not in start.argv  # it would be a part of the first answer's time


@pytest.mark.parametrize("cores, text", [({0, 1}, "0-1"), ({3}, "3"), ({0, 1, 2, 5, 8, 9}, "0-2,5,8-9")])
def test_cores_are_written_as_ranges(cores: set[int], text: str) -> None:
    assert core_list(cores) == text


def test_the_kind_of_weights_is_read_from_the_folder(tmp_path: Path) -> None:
    assert openvino_weights(tmp_path) == "as in its folder"
    (tmp_path / "openvino_model.xml").write_text('<a><weight_compression>\n<backup_mode value="x" /><mode value="int8_asym" /></a>')
    assert openvino_weights(tmp_path) == "int8"


def test_versions_are_asked_of_the_peers_python(tmp_path: Path) -> None:
    assert package_versions(Path(sys.executable), ["numpy", "no-such-package"]).keys() == {"python", "numpy"}
    assert "nothing" in package_versions(tmp_path / "nothing", ["numpy"])["error"]


@pytest.mark.parametrize("text, wrong", [("{", "rows.jsonl"), ('{"max_tokens": 3}\n', "line 1.*prompt_token_ids"), ("\n", "no rows")])
def test_rows_that_engines_would_read_differently_are_refused(tmp_path: Path, text: str, wrong: str) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(WrongRows, match=wrong):
        read_rows(tmp_path / "rows.jsonl")


def test_what_would_fail_at_the_end_fails_before_anything_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("no marks")
    assert command_line.main(["--out", str(tmp_path / "out"), "--readme", str(tmp_path / "README.md")]) == command_line.WRONG_USAGE
    assert "peers: begin" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.model
def test_the_whole_from_command_line_to_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake = engine_of(lambda job, files: by_job(8, 1)(job, files), "batchinfer", "bf16", True)
    monkeypatch.setattr(command_line, "batchinfer_engines", lambda model, concurrency: [fake])
    readme, out = tmp_path / "README.md", tmp_path / "out"
    readme.write_text(f"# R\n{BEGIN}\n{END}\n")
    (tmp_path / "chats.jsonl").write_text(json.dumps({**ROW, "max_tokens": 8}) + "\n")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such library >&2\nexit 7\n")
    broken.chmod(0o755)
    given = ["--out", str(out), "--rounds", "1", "--jobs", "start-up,chats", "--readme", str(readme), "--rows", "12"]
    code = command_line.main([*given, "--workload", str(tmp_path / "chats.jsonl"), "--openvino", str(broken), str(tmp_path)])
    assert code == command_line.SOME_FAILED
    text = readme.read_text()
    assert "| batchinfer | bf16 |" in text
    assert "OpenVINO GenAI (as in its folder), at its first start: exit code 7: no such library" in text
    assert text in f"# R\n{BEGIN}\n{capsys.readouterr().out.rstrip()}\n{END}\n"
    report = json.loads((out / "report.json").read_text())
    assert [outcome["error"] is None for outcome in report["outcomes"]] == [True, False, True, True]
    rows = [json.loads(line) for line in (out / "json-schema.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    assert {json.dumps(row["response_format"]["json_schema"]["schema"]) for row in rows} == {json.dumps(s) for s in SCHEMAS.values()}
    assert all(row["ignore_eos"] and 4 <= row["max_tokens"] <= 16 for row in read_rows(out / "short-answers.jsonl"))
