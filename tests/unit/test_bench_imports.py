"""Benchmarks import only modules and names that exist. Most of them need a GPU or an hour, so no test runs them, and
mypy does not read them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    ROOT / folder for folder in ("bench/gpu", "bench", ".", "learner", "rollout_server", "services", "tools", "tests")
]
"""Where the commands of the benchmarks look for modules, in their order."""
OURS = {path.name for folder in SOURCES for path in folder.iterdir() if (path / "__init__.py").exists()}
NOT_INSTALLED = {"cupy", "datasets", "sglang", "trl", "verl", "vllm"}
"""Peers and engines that a machine need not have."""


def file_of(module: str) -> Path | None:
    for folder in SOURCES:
        path = folder.joinpath(*module.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.exists():
                return file
    return None


def exists(module: str) -> bool:
    """Whether there is such a file of ours, or such a package of others."""
    package = module.partition(".")[0]
    if file_of(module) is not None:
        return True
    return package not in OURS and (package in NOT_INSTALLED or find_spec(package) is not None)


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
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if not exists(alias.name))
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "imports are absolute"
            file = file_of(node.module)
            if not exists(node.module):
                yield node.module
            elif file is not None and not node.module.startswith("penstock.v1"):
                yield from (f"{node.module}.{a.name}" for a in node.names if a.name not in names_of(file))


@pytest.mark.parametrize("source", sorted((ROOT / "bench").rglob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_exists(source: Path) -> None:
    assert list(missing_imports(source)) == []


def test_an_import_that_does_not_exist_is_found(tmp_path: Path) -> None:
    source = tmp_path / "stale.py"
    gone = ["from harness import Bar, Barr", "from scale_parts.gone import p99", "import scale_clients"]
    source.write_text("\n".join([*gone, "from trl import GRPOTrainer", "import support.groups"]))
    assert list(missing_imports(source)) == ["harness.Barr", "scale_parts.gone", "scale_clients"]
