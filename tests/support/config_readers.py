"""Which parts of a run's configuration each process reads, found in its source.

From the entry point of a process, functions and classes are followed by the names that they mention, through imports of
this project. A read is an attribute of something called `config`: `config.replay.lease_ttl_s`, or `self.config.run`.
More may be found than a process executes, but nothing that it reads in this way is missed.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from penstock.config.run import RunConfig

ROOT = Path(__file__).parents[2]
SOURCES = {
    "penstock": ROOT,
    "penstock_rollout": ROOT / "rollout_server",
    "penstock_learner": ROOT / "learner",
    "penstock_services": ROOT / "services",
    "penstock_tools": ROOT / "tools",
}
PROPERTIES = {"folder": ("run_dir", "run"), "cache_folder": ("cache_dir", "run_dir")}
"""Properties of RunConfig, by the fields that they read."""
Name = tuple[str, str]


@functools.cache
def module_source(module: str) -> ast.Module | None:
    package = module.partition(".")[0]
    if package not in SOURCES:
        return None
    path = SOURCES[package].joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text()) if file.is_file() else None


@functools.cache
def definitions(module: str) -> dict[str, ast.AST]:
    tree = module_source(module)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name: node for node in tree.body if isinstance(node, kinds)} if tree else {}


@functools.cache
def imports(module: str) -> dict[str, Name]:
    """Local name: module and name that it stands for. The name is empty for a module."""
    found: dict[str, Name] = {}
    for node in ast.walk(module_source(module) or ast.Module([], [])):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found[alias.asname or alias.name] = (inner, "") if module_source(inner) else (node.module, alias.name)
        elif isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: (alias.name, "") for alias in node.names}
    return found


@functools.cache
def examined(module: str, name: str) -> tuple[frozenset[str], frozenset[Name]]:
    """The paths that a function or class reads, and the definitions that it mentions."""
    node = definitions(module)[name]
    return frozenset(reads(node)), frozenset(mentioned(module, node))


def mentioned(module: str, node: ast.AST) -> Iterator[Name]:
    """Definitions of this project that a function or class mentions."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id in definitions(module):
            yield module, inner.id
        elif isinstance(inner, ast.Name) and inner.id in imports(module):
            target, name = imports(module)[inner.id]
            if name in definitions(target):
                yield target, name
        elif isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
            target, name = imports(module).get(inner.value.id, ("", "-"))
            if not name and inner.attr in definitions(target):
                yield target, inner.attr


def reads(node: ast.AST) -> Iterator[str]:
    """Dotted paths of the configuration that are read in a function or class, the longest of each."""
    inside = {id(inner.value) for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
    for inner in ast.walk(node):
        if not isinstance(inner, ast.Attribute) or id(inner) in inside:
            continue
        parts: list[str] = []
        value: ast.AST = inner
        while isinstance(value, ast.Attribute) and value.attr != "config":
            parts.insert(0, value.attr)
            value = value.value
        is_config = isinstance(value, ast.Attribute) or (isinstance(value, ast.Name) and value.id == "config")
        if is_config and parts:
            yield from _fields(parts)


def _fields(parts: list[str]) -> Iterator[str]:
    """The path up to where it leaves the fields of config models."""
    if parts[0] in PROPERTIES:
        yield from PROPERTIES[parts[0]]
    model: Any = RunConfig
    path: list[str] = []
    for part in parts:
        if model is None or part not in model.model_fields:
            break
        path.append(part)
        annotation = model.model_fields[part].annotation
        models = (m for m in (annotation, *get_args(annotation)) if isinstance(m, type) and issubclass(m, BaseModel))
        model = next(models, None)
    if path:
        yield ".".join(path)


def paths_read_from(*entries: Name, without: Iterable[Name] = ()) -> dict[str, set[str]]:
    """Path: the places that read it, for all that can be reached from the entry points. What is reached only through
    the definitions of `without` is left out."""
    waiting, seen = list(entries), {*entries, *without}
    found: dict[str, set[str]] = {}
    while waiting:
        module, name = waiting.pop()
        paths, targets = examined(module, name)
        for path in paths:
            found.setdefault(path, set()).add(f"{module}.{name}")
        waiting += targets - seen
        seen |= targets
    return found
