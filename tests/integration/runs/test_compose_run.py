"""`docker compose -f deploy/compose/cpu.yaml up` trains. Its processes are started here without containers: with the
commands, environment, secrets and Redis users of the compose file, and with paths and ports of this machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.machine import free_port, wait_for_port
from penstock_tools.local.private_redis import find_redis_server
from support.processes import until

ROOT = Path(__file__).parents[3]
COMPOSE = ROOT / "deploy" / "compose"
PROCESSES = ("gateway", "rollout", "learner", "feed")


class Compose:
    """The services of cpu.yaml as processes of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.services: dict[str, dict[str, Any]] = yaml.safe_load((COMPOSE / "cpu.yaml").read_text())["services"]
        self.redis_port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        script = Path(shutil.copy(COMPOSE / "make-secrets.sh", folder))
        subprocess.run([script], check=True, timeout=30)
        for name in ("redis", "runs"):
            (folder / name).mkdir()
        (folder / "run.yaml").write_text(self._local_config())

    def _local(self, text: str) -> str:
        """A path of a container as the path here."""
        paths = {
            "/etc/penstock/run.yaml": self.folder / "run.yaml",
            "/etc/redis/": ROOT / "deploy" / "redis",
            "/run/secrets": self.folder / "secrets",
            "/run/redis": self.folder / "redis",
            "/opt/examples": ROOT / "examples",
            "/runs": self.folder / "runs",
            "/data": self.folder / "redis",
        }
        for inside, here in paths.items():
            text = text.replace(inside, f"{here}/" if inside.endswith("/") else str(here))
        return text

    def _local_config(self) -> str:
        text = self._local((COMPOSE / "run-cpu.yaml").read_text())
        text = text.replace("redis://redis:6379", f"redis://127.0.0.1:{self.redis_port}").replace(
            "0.0.0.0", "127.0.0.1"
        )
        text = re.sub(r"((?:publish_)?host): (rollout|learner)$", r"\1: 127.0.0.1", text, flags=re.MULTILINE)
        return re.sub(r"(port): \d+$", r"\1: 0", text, flags=re.MULTILINE)

    def start_redis(self) -> None:
        service = self.services["redis"]
        words = [self._local(word) for word in (*service["entrypoint"], *service["command"])]
        environment = {**os.environ, "REDIS_SERVER": find_redis_server(), "REDIS_DATA": str(self.folder / "redis")}
        self._start("redis", [*words, "--port", str(self.redis_port), "--bind", "127.0.0.1"], environment)
        assert wait_for_port("127.0.0.1", self.redis_port, timeout_s=20), self.log("redis")

    def start(self, name: str) -> None:
        service = self.services[name]
        words = [self._local(word) for word in service["command"]]
        environment = {**os.environ, **service["environment"], "HOME": str(self.folder)}
        self._start(name, [sys.executable, "-m", "penstock.cli.main", *words], environment)

    def _start(self, name: str, words: list[str], environment: dict[str, str]) -> None:
        with (self.folder / f"{name}.log").open("w") as output:
            self.processes[name] = subprocess.Popen(
                words, cwd=self.folder, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-3000:]

    def steps(self) -> list[dict[str, Any]]:
        for name, process in self.processes.items():
            assert process.poll() is None, f"{name} ended\n{self.log(name)}"
        metrics = self.folder / "runs" / "compose" / "metrics.jsonl"
        return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []

    def end(self) -> None:
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in reversed(self.processes.values()):
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)


@pytest.fixture
def compose(tmp_path: Path) -> Iterator[Compose]:
    compose = Compose(tmp_path)
    yield compose
    compose.end()


def test_every_service_of_penstock_is_one_that_the_long_test_starts(compose: Compose) -> None:
    own = [name for name, service in compose.services.items() if service["image"].startswith("penstock/")]
    assert sorted(own) == sorted(PROCESSES)
    for name in own:
        for word in [compose._local(word) for word in compose.services[name]["command"]]:
            path = word.partition("=")[2]
            assert not path.startswith("/") or Path(path).exists(), f"{name}: {word}"
    config = yaml.safe_load(compose._local_config())
    assert Path(config["dataset"]["file"]).is_file() and Path(config["model"]["path"]).is_dir()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_processes_of_the_compose_file_train_on_what_its_feed_submits(compose: Compose) -> None:
    compose.start_redis()
    for name in PROCESSES:
        compose.start(name)
    until(lambda: len(compose.steps()) >= 3, "three steps", timeout_s=400)
    assert all(step["reward_mean"] > 0 for step in compose.steps())
