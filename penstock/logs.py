"""Logging of one process: a readable line on a terminal, JSON elsewhere when asked, run and component bound."""

from __future__ import annotations

import json
import logging
import os
import sys
import time


class _JsonFormatter(logging.Formatter):
    def __init__(self, bound: dict[str, str]) -> None:
        super().__init__()
        self.bound = bound

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            **self.bound,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("step", "policy_version", "prompt_id", "server_id"):
            if hasattr(record, name):
                fields[name] = getattr(record, name)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def setup_logging(component: str, run: str = "") -> None:
    """Configure the root logger once per process. PENSTOCK_LOG=json gives one JSON object a line."""
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
