"""Imports objects that a config names by path: agents, tools, rewards, steps and role workers of users.

Code that was written for verl and cannot run here is refused with the way to port it."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import linecache
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.errors import ConfigError, named

_PORTED = {
    ("verl.experimental.agent_loop.", "recipe.langgraph_agent."): "write the agent loop as an `async def`",
    ("verl.tools.function_tool.",): "write the function as a tool class",
    ("verl.workers.reward_manager.", "verl.experimental.reward_loop."): "write the reward manager as `compute_score`",
    ("verl.utils.dataset.",): "write the dataset as a function that returns rows",
    ("verl.DataProto.", "verl.protocol."): "write the reward manager as `compute_score`",
    ("verl.utils.reward_score.",): "install verl for its scores, or choose them in rollout.reward by `kind: verl`",
}
"""What to do with code that uses these modules of verl, the most telling ones first."""
_ANY_OF_VERL = "without verl only its BaseTool and BaseInteraction work; install verl, or port the code"
_PAGE = "docs/coming-from-verl.md#porting-classes"


def load_object(path: str, where: str) -> Any:
    """Import `package.module:Name`, `package.module.Name` or `folder/file.py:Name`. A file is executed once. `where` is
    the config field that holds the path, for error messages."""
    module_path, colon, name = path.rpartition(":")
    if not colon:
        module_path, _, name = path.rpartition(".")
    if not module_path or not name:
        raise ConfigError(f"{where}: {path!r} is not an import path; write package.module:Name or folder/file.py:Name")
    module = _file_module(Path(module_path), where) if module_path.endswith(".py") else _module(module_path, where)
    try:
        loaded = getattr(module, name)
    except AttributeError as error:
        raise ConfigError(f"{where}: {module_path} has no {name!r}; check its spelling") from error
    kind = loaded if isinstance(loaded, type) else type(loaded)
    if way := _way_to_port([base.__module__ for base in kind.__mro__]):
        raise ConfigError(f"{where}: {path} was written for verl and cannot run here; {way}")
    return loaded


def load_callable(path: str, where: str) -> Any:
    loaded = load_object(path, where)
    if not callable(loaded):
        raise ConfigError(f"{where}: {path} is a {type(loaded).__name__}, not a function; name a function")
    return loaded


def _module(name: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (name == missing or name.startswith(f"{missing}.")):
            way = _way_after(error, name) or "install it or set PYTHONPATH"
            raise ConfigError(f"{where}: there is no module {missing}; {way}") from error
        raise ConfigError(f"{where}: importing {name} fails: {_with_way(error)}") from error


def _file_module(path: Path, where: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{where}: there is no file {path}; relative paths start at {Path.cwd()}")
    resolved = str(path.resolve())
    name = f"penstock_user_{path.stem}_{hashlib.sha256(resolved.encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{where}: {path} fails on import: {_with_way(error)}") from error
    return module


def _with_way(error: Exception) -> str:
    way = _way_after(error)
    return f"{named(error)}; {way}" if way else named(error)


def _way_after(error: Exception, wanted: str = "") -> str:
    """How to port code that could not import a module of verl, perhaps `wanted`. Empty for other errors."""
    missing = error.name or "" if isinstance(error, ImportError) else ""
    if not _is_of_verl(missing):
        return ""
    way = _way_to_port([wanted, missing, *_missing_in_failed_file(error)])
    return way or (f"{_ANY_OF_VERL}: {_PAGE}" if missing.startswith("verl") else "")


def _way_to_port(modules: Iterable[str]) -> str:
    """How to port code that uses these modules. Empty if none of them is in the table."""
    used = [f"{module}." for module in modules]
    for of_verl, way in _PORTED.items():
        if any(module.startswith(of_verl) for module in used):
            return f"{way}: {_PAGE}"
    return ""


def _missing_in_failed_file(error: Exception) -> list[str]:
    """What the file that raised the error imports of verl and is not there. The error may name only verl's root."""
    source = "".join(linecache.getlines(traceback.extract_tb(error.__traceback__)[-1].filename))
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            package = f"{node.module}." if isinstance(node, ast.ImportFrom) and not node.level else ""
            names += [f"{package}{alias.name}" for alias in node.names]
    parts = [(name, *name.rpartition(".")) for name in names if _is_of_verl(name)]
    return [whole for whole, package, _, name in parts if not hasattr(sys.modules.get(package), name)]


def _is_of_verl(module: str) -> bool:
    return module.partition(".")[0] in ("verl", "recipe")


def hint_for_name(name: str, known: Iterable[str], *, others: str = "") -> str:
    """What may be meant by an unknown name: a similar one, or all known ones. `others` says what else is allowed."""
    names = list(known)
    nearest = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(names)}{others}"
