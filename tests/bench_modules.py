"""Modules of bench/ in a test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[1] / "bench"


@contextmanager
def imported_bench(*names: str) -> Iterator[list[Any]]:
    """Import modules of bench/ and bench/gpu/. None of them, nor what they import from there, stays imported: their
    names are short, and the next test may change what they read."""
    before, path = set(sys.modules), list(sys.path)
    sys.path[:0] = [str(BENCH / "gpu"), str(BENCH)]
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            if str(BENCH) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
