"""Benchmarks import only modules and names that exist. Most of them need a GPU or an hour, so no test runs them, and
mypy does not read them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / folder for folder in ("bench/gpu", "bench", ".", "learner", "rollout_server", "services", "tests")]
"""Where the commands of the benchmarks look for modules, in their order."""
ROOMS = {path.name for folder in SOURCES for path in folder.iterdir() if (path / "__init__.py").exists()}


def file_of(module: str) -> Path | None:
    for folder in SOURCES:
        path = folder.joinpath(*module.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.exists():
                return file
    return None


@cache
def names_of(file: Path) -> set[str]:
    """What a module defines or imports at its top level, and the modules of a room."""
    found = {path.stem for path in file.parent.iterdir()} if file.name == "__init__.py" else set()
    for node in ast.parse(file.read_text()).body:
        for inner in ast.walk(node) if isinstance(node, ast.If | ast.Try) else [node]:
            if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(inner.name)
            elif isinstance(inner, ast.Import | ast.ImportFrom):
                found |= {(alias.asname or alias.name).partition(".")[0] for alias in inner.names}
            elif isinstance(inner, ast.Assign | ast.AnnAssign):
                targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
                found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


def missing_imports(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.module is None or node.module.startswith("penstock.v1"):
            continue
        file = file_of(node.module)
        if file is not None:
            yield from (f"{node.module}.{a.name}" for a in node.names if a.name not in names_of(file))
        elif node.module.partition(".")[0] in ROOMS:
            yield node.module


@pytest.mark.parametrize("source", sorted((ROOT / "bench").rglob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_exists(source: Path) -> None:
    assert list(missing_imports(source)) == []


def test_an_import_that_does_not_exist_is_found(tmp_path: Path) -> None:
    source = tmp_path / "stale.py"
    gone = ["from harness import Bar, Barr", "from scale_parts.gone import p99", "from penstock.nowhere import x"]
    source.write_text("\n".join([*gone, "from trl import GRPOTrainer"]))
    assert list(missing_imports(source)) == ["harness.Barr", "scale_parts.gone", "penstock.nowhere"]
