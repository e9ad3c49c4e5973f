"""Logging of one process: readable lines, or JSON if PENSTOCK_LOG=json, with the run and component on every line.

Fields such as the step or the prompt id (`FIELDS`) are bound where they become known. Every line that the task logs
afterwards carries them, and so do the tasks that it starts.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

FIELDS = ("request_id", "step", "policy_version", "prompt_id", "attempt", "server_id")
_NAMES = frozenset(FIELDS)
_about: ContextVar[Mapping[str, object]] = ContextVar("about", default=MappingProxyType({}))


def bind(**fields: object) -> None:
    """Add fields to every line that the current task logs from here on."""
    assert fields.keys() <= _NAMES, f"{fields.keys() - _NAMES} are not fields of a log line"
    _about.set({**_about.get(), **fields})


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: Mapping[str, str]) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            **self.process,
            "logger": record.name,
            "message": record.getMessage(),
            **_about.get(),
            **{name: getattr(record, name) for name in FIELDS if hasattr(record, name)},
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def setup_logging(component: str, run: str = "") -> None:
    """Configure the root logger of this process. Call it once, when the process starts.

    PENSTOCK_LOG=json writes one JSON object per line. PENSTOCK_LOG_LEVEL sets the level, INFO by default."""
    handler = logging.StreamHandler(sys.stderr)
    if os.environ.get("PENSTOCK_LOG") == "json":
        handler.setFormatter(_JsonFormatter({"component": component, "run": run}))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {component} %(levelname)s %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(os.environ.get("PENSTOCK_LOG_LEVEL", "INFO").upper())
    for noisy in ("httpx", "uvicorn.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


@contextmanager
def printing_to(log: Path | None) -> Iterator[TextIO]:
    """Add what libraries and child processes print within the block, such as an engine's pages, to a file. Yields the
    stderr of before, which also gets our own warnings. Without a file nothing changes."""
    if log is None:
        yield sys.stderr
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    before = {number: os.dup(number) for number in (1, 2)}
    with log.open("a") as file, os.fdopen(before[2], "w", buffering=1) as terminal:
        own = logging.StreamHandler(terminal)
        own.setLevel(logging.WARNING)
        own.addFilter(lambda record: record.name.startswith("penstock"))
        own.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        logging.getLogger().addHandler(own)
        try:
            for number in before:
                os.dup2(file.fileno(), number)
            yield terminal
        finally:
            logging.getLogger().removeHandler(own)
            sys.stdout.flush()
            sys.stderr.flush()
            for number, kept in before.items():
                os.dup2(kept, number)
            os.close(before[1])
