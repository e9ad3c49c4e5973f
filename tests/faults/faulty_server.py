"""A rollout server that misses updates while a file exists: `python -m faults.faulty_server --config …`.

Everything but the loading of weights is that of penstock_rollout: it samples with the torch engine, and reports every
version and digest as if it had loaded them.

| variable | meaning |
|---|---|
| FAULTY_KIND | `frozen`, `layer` or `stale_kv`: see faulty_engine.py |
| FAULTY_FILE | the fault happens while this file exists |
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from faulty_engine import FaultyEngine
from penstock_rollout import __main__ as rollout_process
from penstock_rollout import server as rollout_server

KIND = "FAULTY_KIND"
FILE = "FAULTY_FILE"


def create_engine(config: Any, model_path: Path, dtype: str, seed: int) -> FaultyEngine:
    engine = FaultyEngine(config, model_path, dtype, seed)
    engine.fault = os.environ.get(KIND, "frozen")  # type: ignore[assignment]
    engine.is_faulty = Path(os.environ.get(FILE, "/nonexistent")).exists
    return engine


def main() -> int:
    rollout_server.create_engine = create_engine  # type: ignore[assignment]
    return rollout_process.main()


if __name__ == "__main__":
    raise SystemExit(main())
