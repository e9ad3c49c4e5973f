"""Prometheus exposition of one process."""

from __future__ import annotations

import json
import os
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server

from penstock.errors import Unavailable

PREFIX = "penstock"
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Buckets of what a request or a call takes."""
LONG_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Buckets of what a group, a step, a checkpoint or a recovery takes."""


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> int:
    """Serve /metrics from a daemon thread and return the port."""
    try:
        server, _ = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise Unavailable(f"port {port} on {host} is in use; set metrics_port to a free one or 0") from error
    bound: int = server.server_port
    return bound


def write_endpoint(folder: Path, component: str, **fields: object) -> None:
    """Tell the other processes of this machine where `component` listens: `folder/component.json`, replaced whole."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{component}.json.partial"
    partial.write_text(json.dumps({"pid": os.getpid(), **fields}))
    partial.rename(folder / f"{component}.json")
