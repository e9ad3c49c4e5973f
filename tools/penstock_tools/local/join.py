"""A run on several machines: `penstock up --host ADDRESS` opens it on the first one, `penstock join FILE` adds others.

The first machine writes JOIN_FILE into the run's folder: the config of the run, and the contents of its key files. An
operator copies this one file to another machine. Neither command sends a key over the network to hand it over. What
`join` writes is in `hosts/HOST` of the run's folder, which may be on a volume that the machines share.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import yaml

from penstock.config.loading import dump_config, load_overrides, parse_overrides, read_config
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.machine import address_towards, is_loopback, port_is_free, visible_gpus, write_private
from penstock.store.keys import check_name
from penstock_learner.roles.ray_address import ask_cluster
from penstock_tools.local.processes import ORPHANS_S, Child, ProcessGroup, Restarts, gpus_of_servers, try_lock

JOIN_FILE = "join.yaml"
KEY_FIELDS = (
    "weights.cluster_key_file", "redis.password_file", "redis.tls_ca_file", "redis.tls_cert_file", "redis.tls_key_file",
    "tls.ca_file", "tls.cert_file", "tls.key_file",
)  # fmt: skip
"""Fields of the config whose files travel inside JOIN_FILE."""
RAY_TOKEN = "ray_token"  # noqa: S105  (a name)
POLL_S = 0.5
REACH_S = 40.0
"""How long a Ray node waits for the head at its start."""


# ── the first machine ──


def opened(config: RunConfig, host: str, cluster_key_file: Path) -> RunConfig:
    """The config of a run whose processes on this machine, `host`, are reached from others."""
    if host == "0.0.0.0" or not port_is_free(host, 0):  # noqa: S104  (others cannot connect to it)
        raise ConfigError(
            f"--host {host} is not an address of this machine; give the one that the others reach, as IPv4"
        )
    if starts_ray_head(config, host) and config.rollout.num_servers and visible_gpus():
        raise ConfigError(
            "Ray offers all GPUs of this machine to the learner; set rollout.num_servers to 0, and start rollout "
            "servers with `penstock join` on others"
        )
    if config.redis.url and is_loopback(urlsplit(config.redis.url).hostname or "localhost"):
        raise ConfigError(
            "redis.url is reachable from this machine only; give the address that the others reach, or none"
        )
    if config.tls.files and not config.redis.url:
        raise ConfigError("tls: the Redis that `penstock up` starts has none; set redis.url to a rediss:// one")
    changes: dict[str, object] = {
        "weights.cluster_key_file": config.weights.cluster_key_file or cluster_key_file,
        "learner.publish_host": config.learner.publish_host or host,
    }
    if is_loopback(config.rollout.host):
        changes["rollout.host"] = host
    return config.changed(changes)


def starts_ray_head(config: RunConfig, host: str) -> bool:
    """Whether `learner.ray_address` is on this machine, so that the head is one of the run's processes."""
    return bool(host) and config.learner.ray_address.rpartition(":")[0].strip("[]") == host


def ray_command(host: str, *arguments: str) -> list[str]:
    """The command of a Ray node on this machine."""
    words = ["-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", f"--node-ip-address={host}"]
    return [sys.executable, *words, *arguments]


def ray_head_command(config: RunConfig, host: str, folder: str) -> list[str]:
    """`folder` gets a folder of Ray, of which other nodes make one with the same path."""
    port = config.learner.ray_address.rpartition(":")[2]
    return ray_command(host, "--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}/r")


def ray_environment(token_file: Path) -> dict[str, str]:
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file), "RAY_worker_niceness": "0"}


def write_join_file(config: RunConfig, ray_token_file: Path | None) -> Path:
    """Write what another machine needs. Only the owner can read the file."""
    files: dict[str, Path | None] = {field: attrgetter(field)(config) for field in KEY_FIELDS}
    files[RAY_TOKEN] = ray_token_file
    keys = {name: file.read_text() for name, file in files.items() if file is not None}
    data = {"config": config.model_dump(mode="json"), "keys": keys, "is_whole": True}
    return write_private(config.folder / JOIN_FILE, yaml.safe_dump(data, sort_keys=False))


# ── another machine ──


def read_join_file(file: Path) -> tuple[dict[str, object], dict[str, str]]:
    """Return the config's data, and the contents of key files by KEY_FIELDS. Raises ConfigError."""
    data = read_config(file)
    if file.stat().st_mode & 0o077:
        raise ConfigError(f"{file} holds keys, and other users of this machine can read it; run `chmod 600 {file}`")
    config, keys, known = data.get("config"), data.get("keys"), {*KEY_FIELDS, RAY_TOKEN}
    is_whole = data.get("is_whole") is True  # the last line: a copy may have been cut off
    if not (is_whole and isinstance(config, dict) and isinstance(keys, dict) and keys.keys() <= known):
        raise ConfigError(
            f"{file} is not a whole join file; copy {JOIN_FILE} from the run's folder on the machine of `penstock up "
            "--host`"
        )
    return config, {str(name): str(text) for name, text in keys.items()}


class Joined:
    """This machine's part of a run: its rollout servers, or its Ray node for the learner's ranks."""

    def __init__(self, file: Path, overrides: Sequence[str], num_servers: int | None, *, is_ray_node: bool) -> None:
        data, keys = read_join_file(file)
        config = load_overrides(data, overrides, str(file))
        self.name = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())
        check_name("the name of this machine", self.name)
        self.folder = config.folder / "hosts" / self.name
        self.is_ray_node = is_ray_node
        self.num_servers = num_servers or max(1, len(visible_gpus()) // config.rollout.engine.tensor_parallel_size)
        self.key_files = {name: self.folder / "keys" / name for name in keys}
        self._keys = keys
        if is_ray_node and config.learner.ray_address.rpartition(":")[0] == "":
            raise ConfigError(
                "the learner of this run has a private Ray, which no machine can join; start the run with "
                "--learner.ray_address HOST:PORT, where HOST is the address given to `penstock up --host`"
            )
        self.host = self._own_address(config, overrides)
        changes = {name: path for name, path in self.key_files.items() if name != RAY_TOKEN}
        self.config = config.changed(changes | {"rollout.host": self.host})

    def _own_address(self, config: RunConfig, overrides: Sequence[str]) -> str:
        """The address on the way to Redis, unless the command line gives one: the others are there too."""
        if ["rollout", "host"] in [keys for keys, _ in parse_overrides(overrides)]:
            return config.rollout.host
        url = urlsplit(config.redis.url)
        try:
            return address_towards(url.hostname or "", url.port or 6379)
        except OSError as error:
            raise ConfigError(
                f"there is no way from this machine to {url.hostname} ({error.strerror}), where the run's Redis is; "
                "connect the two, or start the run with another --host"
            ) from error

    def run(self) -> None:
        """Run until SIGTERM or SIGINT. Processes that were up are started again whenever they end, because the network
        may be away for any time. Raises ProcessDied if a server ends before it was ever up, and other
        errors if the head of Ray refuses this machine. A second SIGINT kills the processes at once."""
        self.folder.mkdir(parents=True, exist_ok=True)
        processes, stopping = ProcessGroup(self.folder / "logs"), threading.Event()
        processes.on_wait = partial(print, flush=True)

        def stop(number: int, _: object) -> None:
            if stopping.is_set() and number == signal.SIGINT:
                processes.end_at_once()
            stopping.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        with self._locked(stopping) as lock:
            processes.held_file = lock
            for name, text in self._keys.items():
                write_private(self.key_files[name], text)
            config_file = write_private(self.folder / "config.yaml", dump_config(self.config))
            try:
                self._start(processes, config_file)
                self._watch(processes, stopping)
            finally:
                processes.stop()

    def _locked(self, stopping: threading.Event) -> IO[str]:
        """Lock this machine's folder of the run. If its `join` was killed, wait until its processes have ended."""
        deadline = time.monotonic() + ORPHANS_S
        taken = f"this machine has joined run {self.config.run} already ({self.folder}); stop that first"
        while True:
            if lock := try_lock(self.folder, taken):
                return lock
            if stopping.wait(POLL_S) or time.monotonic() > deadline:
                raise ConfigError(taken)

    def _start(self, processes: ProcessGroup, config_file: Path) -> None:
        if self.is_ray_node:
            token, address = self.key_files.get(RAY_TOKEN), self.config.learner.ray_address
            os.environ.update(ray_environment(token) if token else {})
            ask_cluster(address, REACH_S)
            processes.start("ray", ray_command(self.host, f"--address={address}"), stop_timeout_s=60)
            return
        gpus = gpus_of_servers(self.num_servers, self.config.rollout.engine.tensor_parallel_size, visible_gpus())
        for index in range(self.num_servers):
            name = f"{self.name}-{index}"
            command = [sys.executable, "-m", "penstock_rollout", "--config", str(config_file), "--server-id", name]
            processes.start(name, command, environment=gpus[index] if gpus else None, stop_timeout_s=30)

    def _watch(self, processes: ProcessGroup, stopping: threading.Event) -> None:
        ready: set[str] = set()

        def was_ready(child: Child) -> bool:
            if child.name not in ready and child.has_written(self.config.folder / f"{child.name}.json"):
                ready.add(child.name)
                print(f"{child.name} serves at {self.host}; logs in {processes.log_folder}", flush=True)
            return child.name in ready or self.is_ray_node

        names = [child.name for child in processes.children]
        print(f"joining run {self.config.run} as {self.host}: starting {', '.join(names)}", flush=True)
        restarts = Restarts(processes, names, sys.maxsize, was_ready)
        while not stopping.wait(POLL_S):
            for child in processes.children:
                was_ready(child)
            for restart in restarts.check():
                print(f"{restart.text}; it is started again in {restart.delay_s:g} s", flush=True)
