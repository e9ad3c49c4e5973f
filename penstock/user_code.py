"""Imports objects that a config names by path: agents, tools, rewards, steps and role workers of users."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.errors import ConfigError, named


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
        return getattr(module, name)
    except AttributeError as error:
        raise ConfigError(f"{where}: {module_path} has no {name!r}; check its spelling") from error


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
            raise ConfigError(f"{where}: there is no module {missing}; install it or set PYTHONPATH") from error
        raise ConfigError(f"{where}: importing {name} fails: {named(error)}") from error


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
        raise ConfigError(f"{where}: {path} fails on import: {named(error)}") from error
    return module


def hint_for_name(name: str, known: Iterable[str], *, others: str = "") -> str:
    """What may be meant by an unknown name: a similar one, or all known ones. `others` says what else is allowed."""
    names = list(known)
    nearest = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(names)}{others}"
