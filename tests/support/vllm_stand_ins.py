"""Imports modules of ours that need vLLM where it is not installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest


@contextmanager
def imported_beside(
    monkeypatch: pytest.MonkeyPatch, ours: str, contents: Mapping[str, Mapping[str, Any]]
) -> Iterator[Any]:
    """The module `ours`, imported anew while vLLM consists of `contents`: the names in each of its modules. Afterwards
    it is as if it had not been imported."""
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, ours, raising=False)
    yield importlib.import_module(ours)
    sys.modules.pop(ours, None)
