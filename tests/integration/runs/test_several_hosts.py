"""`penstock up --host` on one host and `penstock join` on two others. The hosts are network namespaces, with names that
mean 127.0.1.1 as on Debian, and with their own folders and process ids. No packet leaves the namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.processes import ROOT, until

EXAMPLE = ROOT / "examples" / "arithmetic"
DEADLINE_S = 400.0
CONFIG = """
run: hosts
model: {path: MODEL}
dataset: {file: DATA, max_tokens: 8, epochs: 0}
replay: {groups_per_step: 8, max_staleness: 2, lease_ttl_s: 5}
rollout:
  num_servers: 0
  max_concurrent_groups: 4
  engine: {name: torch, max_model_len: 64}
  reward: {function_file: REWARD, num_processes: 1}
weights: {ready_timeout_s: 5, push_timeout_s: 20}
learner:
  num_steps: 100000
  algorithm: {kl: {placement: none}}
  checkpoint: {every_steps: 5}
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=30, capture_output=True)


class Host:
    """A namespace with an address in the network of the test, and with a folder of its own."""

    def __init__(self, network: Network, number: int) -> None:
        self.name = f"{network.name}-{number}"
        self.address = f"10.213.0.{number}"
        self.folder = network.folder / str(number)
        self.process: subprocess.Popen[bytes] | None = None
        self.folder.mkdir()
        self.etc = Path("/etc/netns") / self.name
        self.etc.mkdir(parents=True)
        (self.etc / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
        ip("netns", "add", self.name)
        self.port = f"{network.name}p{number}"
        ip("link", "add", self.port, "netns", network.name, "type", "veth", "peer", "eth0", "netns", self.name)
        ip("-n", network.name, "link", "set", self.port, "master", "bridge", "up")
        ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", self.name, "link", "set", device, "up")

    def start(self, *words: str) -> None:
        """Run a command of penstock. Killing it kills all processes of the host."""
        inside = f'hostname {self.name}; exec "$@"'
        command = [
            "ip", "netns", "exec", self.name, "unshare", "--pid", "--fork", "--uts", "--mount-proc", "--kill-child",
            "sh", "-c", inside, "sh", sys.executable, "-m", "penstock.cli.main", *words,
        ]  # fmt: skip
        environment = {**os.environ, "TMPDIR": str(self.folder), "HOME": str(self.folder)}
        with (self.folder / "output").open("ab") as output:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def text(self) -> str:
        logs = sorted(self.folder.glob("runs/**/logs/*.log"))
        return "\n".join(f"{path}:\n{path.read_text()[-3000:]}" for path in (self.folder / "output", *logs))

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)
        subprocess.run(["ip", "netns", "del", self.name], check=False, timeout=30, capture_output=True)
        shutil.rmtree(self.etc, ignore_errors=True)


class Network:
    """Three hosts at a bridge, which is in a namespace too."""

    def __init__(self, folder: Path) -> None:
        self.name = f"pen{uuid.uuid4().hex[:6]}"
        self.folder = folder
        self.hosts: list[Host] = []

    def open(self) -> None:
        ip("netns", "add", self.name)
        ip("-n", self.name, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.name, "link", "set", "bridge", "up")
        for number in (1, 2, 3):
            self.hosts.append(Host(self, number))

    def set_link(self, host: Host, state: str) -> None:
        ip("-n", self.name, "link", "set", host.port, state)

    def close(self) -> None:
        for host in reversed(self.hosts):
            host.end()
        subprocess.run(["ip", "netns", "del", self.name], check=False, timeout=30, capture_output=True)


@pytest.fixture
def network() -> Iterator[Network]:
    # Ray's sockets need a path of at most 107 bytes, and that of `tmp_path` is long.
    with tempfile.TemporaryDirectory(prefix="h", dir="/tmp", ignore_cleanup_errors=True) as folder:
        network = Network(Path(folder))
        try:
            network.open()
        except (OSError, subprocess.SubprocessError) as error:
            network.close()
            pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', None) or error}")
        yield network
        network.close()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_trains_over_three_hosts_and_one_that_was_cut_off_comes_back(network: Network) -> None:
    first, *others = network.hosts
    text = CONFIG.replace("MODEL", str(EXAMPLE / "model")).replace("DATA", str(EXAMPLE / "train.parquet"))
    (first.folder / "run.yaml").write_text(text.replace("REWARD", str(EXAMPLE / "reward.py")))
    first.start("up", "run.yaml", "--host", first.address)
    run = first.folder / "runs" / "hosts"
    wait(network, (run / "join.yaml").exists, "the join file")
    for host in others:
        shutil.copy2(run / "join.yaml", host.folder)  # an operator uses scp
        host.start("join", "join.yaml")

    def steps() -> list[dict[str, Any]]:
        metrics = run / "metrics.jsonl"
        return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []

    def newest_version(host: Host) -> int:
        """The newest version that the host's server has logged."""
        log = host.folder / "runs" / "hosts" / "hosts" / host.name / "logs" / f"{host.name}-0.log"
        lines = [line for line in log.read_text().splitlines() if "serving version " in line] if log.exists() else []
        return int(lines[-1].partition("serving version ")[2].partition(",")[0]) if lines else -1

    wait(network, lambda: len(steps()) >= 3, "three steps")
    wait(network, lambda: min(newest_version(host) for host in others) >= 3, "both servers to follow")

    cut = others[1]
    network.set_link(cut, "down")
    num_before, version_before = len(steps()), newest_version(cut)
    wait(network, lambda: len(steps()) >= num_before + 10, "ten steps without the host that is cut off")
    assert newest_version(cut) <= version_before + 1, "nothing reached it"
    network.set_link(cut, "up")
    wait(network, lambda: newest_version(cut) >= num_before + 10, "the host that was cut off to follow again")
    num_now = len(steps())
    wait(network, lambda: len(steps()) >= num_now + 3, "three steps with all hosts")


def wait(network: Network, found: Any, about: str) -> None:
    def is_found() -> bool:
        for host in network.hosts:
            assert host.process is None or host.process.poll() is None, f"{host.name} ended\n{host.text}"
        return bool(found())

    try:
        until(is_found, about, DEADLINE_S)
    except AssertionError as error:
        raise AssertionError("\n\n".join([str(error), *(host.text for host in network.hosts)])) from error
