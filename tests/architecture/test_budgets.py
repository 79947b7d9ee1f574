"""The limits that keep files readable, checked: imports, sizes, names, docstrings, settings that are read."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from batchinfer.config import EngineConfig

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "batchinfer"
SOURCES = sorted(PACKAGE.rglob("*.py"))
NATIVE_SOURCES = sorted([*PACKAGE.rglob("*.cpp"), *PACKAGE.rglob("*.h")])
MAX_FILE_LINES = 400
MAX_CLASS_LINES = 250
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6
GUARDED = {"engine.py": 280, "core/scheduler.py": 230, "runtime/runner.py": 100}  # raising one is a change of its own
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
COMMANDS = PACKAGE / "cli"  # command functions only gather options: exempt from the function limits

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def lines_of(node: Function | ast.ClassDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def parameters_of(node: Function) -> int:
    given = node.args
    count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) + bool(given.vararg) + bool(given.kwarg)
    first = (given.posonlyargs + given.args)[:1]
    return count - (bool(first) and first[0].arg in ("self", "cls"))


def is_command(path: Path, node: Function) -> bool:
    if COMMANDS not in path.parents:
        return False
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any("gathers_flags" in text or ".command" in text or ".callback" in text for text in decorators)


@pytest.mark.parametrize("path", NATIVE_SOURCES, ids=name_of)
def test_sizes_of_native_sources(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_sizes(path: Path) -> None:
    tree = tree_of(path)
    lines = len(path.read_text(encoding="utf-8").splitlines())
    found = [f"{lines} lines"] if lines > GUARDED.get(name_of(path), MAX_FILE_LINES) else []
    found += [
        f"class {n.name}: {lines_of(n)} lines" for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and lines_of(n) > MAX_CLASS_LINES
    ]
    for node in functions(tree):
        if is_command(path, node):
            continue
        if lines_of(node) > MAX_FUNCTION_LINES:
            found.append(f"{node.name}: {lines_of(node)} lines")
        if parameters_of(node) > MAX_PARAMETERS:
            found.append(f"{node.name}: {parameters_of(node)} parameters")
    assert not found


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_public_names_have_docstrings(path: Path) -> None:
    tree = tree_of(path)
    found = [] if ast.get_docstring(tree) or not tree.body else ["the module"]
    public = [n for n in tree.body if isinstance(n, Function | ast.ClassDef) and not n.name.startswith("_")]
    assert not [*found, *(node.name for node in public if not ast.get_docstring(node))]


def test_no_file_is_named_after_nothing() -> None:
    places = [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    assert not [path for path in places if path.stem in FORBIDDEN_NAMES]


def settings_used(tree: ast.AST) -> set[str]:
    """Settings that a module acts on: attributes of an `EngineConfig`, and names in tables that `getattr(config, name)` goes through.

    A setting that is only repeated under its own name, as in `{"seed": config.seed}`, is shown, not used.
    """
    if not any(isinstance(node, ast.ImportFrom) and any(name.name == "EngineConfig" for name in node.names) for node in ast.walk(tree)):
        return set()
    shown = {
        value
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(value, ast.Attribute) and key.value == value.attr
    }
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node not in shown]
    used = {node.attr for node in attributes if ast.unparse(node.value) in ("config", "self._config")}
    if any(isinstance(node, ast.Call) and ast.unparse(node).startswith("getattr(config, ") for node in ast.walk(tree)):
        tables = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("_DEFAULTS")
        ]
        used.update(name for table in tables for name in ast.literal_eval(table))
    return used


def test_every_setting_changes_something() -> None:
    """What builds and runs the engine acts on it: a report or a command that shows a setting does not make it work."""
    others = (COMMANDS, PACKAGE / "reports", PACKAGE / "job")
    readers = [path for path in SOURCES if path.name != "config.py" and not any(folder in path.parents for folder in others)]
    used = set().union(*(settings_used(tree_of(path)) for path in readers))
    assert {f.name for f in fields(EngineConfig)} <= used


def test_settings_that_are_only_shown_do_not_count_as_used() -> None:
    known = "from batchinfer.config import EngineConfig\n"
    assert settings_used(ast.parse(known + "{'seed': config.seed}; model.config.dtype; getattr(config, name)")) == set()
    assert settings_used(ast.parse(known + "A_DEFAULTS = {'x': 1}; getattr(config, name); self._config.seed")) == {"x", "seed"}
    assert settings_used(ast.parse("config.seed")) == set()


def test_the_control_plane_and_the_files_do_not_import_torch() -> None:
    """Imported for real, in a fresh interpreter: what a module imports inside others counts too."""
    script = (
        "import importlib, pkgutil, sys\n"
        "for package in ('batchinfer.core', 'batchinfer.io', 'batchinfer.job'):\n"
        "    root = importlib.import_module(package)\n"
        "    for module in pkgutil.walk_packages(root.__path__, package + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert shown.stdout.split() == ["False", "False"]


def test_import_contracts_hold() -> None:
    """In a process of its own: the linter's logging settings would silence the loggers that other tests listen to."""
    script = (
        "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(config_filename='pyproject.toml', no_cache=True))"
    )
    shown = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stdout


def test_constraints_pin_every_dependency() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    wanted = [*project["dependencies"], *(name for names in project["optional-dependencies"].values() for name in names)]
    names = {re.split(r"[<>=!~\[ ]", text)[0].lower().replace("_", "-") for text in wanted}
    assert names <= pinned
