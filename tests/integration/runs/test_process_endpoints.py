"""The probes of the feed. test_rolling_upgrade.py asks those of servers and learners."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from penstock.config.loading import dump_config
from penstock.machine import free_port
from support.fleet_runs import fleet_config
from support.processes import probe, until
from support.redis_server import RedisProcess

ROOT = Path(__file__).parents[3]
PATHS = ("/healthz", "/startupz", "/readyz")


def test_the_feed_answers_probes(tmp_path: Path, redis_process: RedisProcess) -> None:
    config = fleet_config(tmp_path, redis_process.url, "probed")
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}?"}) + "\n" for i in range(50)))
    dataset = config.dataset.model_copy(update={"file": data, "epochs": 0, "max_pending": 20})
    config_file, port = tmp_path / "config.yaml", free_port()
    config_file.write_text(dump_config(config.model_copy(update={"dataset": dataset})))
    words = [sys.executable, "-m", "penstock.cli.commands.feed", "--config", str(config_file)]
    words += ["--dataset.metrics_port", str(port)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: (probe(port) or (0,))[0] == 200, "the feed to be ready")
        assert [(probe(port, path) or (0,))[0] for path in PATHS] == [200, 200, 200]
    finally:
        process.terminate()
        process.wait(120)
    announced = json.loads((config.folder / "feed-train.json").read_text())
    assert "metrics_port" not in announced and announced["plan"], "a feed that has ended does not listen"
