"""Runs a learner and rollout servers as real processes that a test can stop, kill and restart, and watches them.

Every wait of a test has a deadline, and fails with the ends of the logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import psutil
import redis
import redis.asyncio

from penstock.codec import encode_prompt
from penstock.config.loading import dump_config, validate
from penstock.config.run import RunConfig
from penstock.errors import PenstockError
from penstock.feed.datasets import read_prompts
from penstock.replay.inspection import QueueInspector
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import QueueStat
from penstock.store.fleet import Fleet, PolicyRegistry, ServerRecord
from penstock.store.keys import RunKeys
from penstock.store.redis_client import connect
from penstock.trajectory import Group, Prompt, Sampling
from penstock.v1 import policies_pb2
from support.processes import LISTING_S

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "arithmetic"
POLL_S = 0.1
START_S = 240.0
"""On a busy machine a start takes minutes."""
LOG_TAIL = 2500
NUM_SAMPLES = 4
T = TypeVar("T")


def fleet_config(folder: Path, redis_url: str, run: str, **weights: Any) -> RunConfig:
    """The arithmetic example in small, with deadlines short enough for a test."""
    return validate(
        {
            "run": run,
            "run_dir": str(folder),
            "model": {"path": str(EXAMPLE / "model")},
            "redis": {"url": redis_url},
            "replay": {"groups_per_step": 8, "max_staleness": 2, "lease_ttl_s": 6},
            "rollout": {
                "max_concurrent_groups": 6,
                "engine": {"name": "vllm", "max_model_len": 64, "kv_cache_bytes": 2**25, "enforce_eager": True},
                "reward": {"function_file": str(EXAMPLE / "reward.py")},
            },
            "weights": {
                "ready_timeout_s": 6,
                "push_timeout_s": 12,
                "snapshot_every_steps": 1,
                "keep_snapshots": 10_000,
                **weights,
            },
            "learner": {
                "num_steps": 0,
                "lr": 3e-4,
                "algorithm": {"correction": {"mode": "bypass"}, "kl": {"placement": "none"}},
                "checkpoint": {"every_steps": 10},
                "batch_timeout_s": 120,
                "rank_timeout_s": 120,
            },
        },
        "test",
    )


class Part:
    """One process of a run and its descendants. `may_end` is set if the test expects it to end."""

    def __init__(
        self, name: str, command: list[str], log: Path, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.name = name
        self.log = log
        self.may_end = False
        with log.open("ab") as output:
            self._log_start = output.tell()
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment}
            )
        self._root = psutil.Process(self.process.pid)
        self._seen: dict[int, psutil.Process] = {}

    def tree(self) -> list[psutil.Process]:
        """The process and every descendant seen so far, parents first."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._seen |= {child.pid: child for child in self._root.children(recursive=True)}
        return [self._root, *self._seen.values()]

    def stop(self) -> None:
        """Send SIGSTOP to the whole tree, so that it hangs."""
        self._signal_tree(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal_tree(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL to the process alone. Its descendants must notice by themselves."""
        self.tree()
        self.may_end = True
        self.process.kill()
        self.process.wait(timeout=60)

    def output(self) -> str:
        return self.log.read_bytes()[self._log_start :].decode(errors="replace")

    def end(self) -> None:
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(timeout=60)

    def _signal_tree(self, number: signal.Signals) -> None:
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


@dataclass(frozen=True)
class Move:
    """A change of a server's state, with the time of Redis' clock."""

    time_s: float
    server_id: str
    state: str


@dataclass(frozen=True)
class Report:
    """A server's report of the version it serves."""

    time_s: float
    server_id: str
    policy_version: int
    weights_digest: str


@dataclass
class Watch:
    """Records the events of a run as Redis sees them: every change of a state, every version that a server reported,
    every appended group, and conservation at many moments."""

    moves: list[Move] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    groups: dict[tuple[int, int], Group] = field(default_factory=dict)
    """Groups by prompt and attempt."""
    conservation_errors: list[int] = field(default_factory=list)

    def states(self, server_id: str, since_s: float = 0.0) -> list[str]:
        """The states a server went through, without repetitions."""
        moved = [move.state for move in list(self.moves) if move.server_id == server_id and move.time_s >= since_s]
        return [state for state, _ in itertools.groupby(moved)]

    def versions(self, server_id: str, since_s: float = 0.0) -> list[int]:
        """The versions a server reported, in order, without repetitions."""
        seen = [r.policy_version for r in list(self.reports) if r.server_id == server_id and r.time_s >= since_s]
        return [version for version, _ in itertools.groupby(seen)]

    def groups_of(self, server_id: str, since_ms: float = 0.0) -> list[Group]:
        return [g for g in self.all_groups() if g.server_id == server_id and g.finished_at_ms >= since_ms]

    def all_groups(self) -> list[Group]:
        """A copy of the groups, because the watching thread adds to them."""
        return list(self.groups.values())


class FleetRun:
    """One run: its parts by name, and its watch. Leaving the context ends everything."""

    def __init__(self, config: RunConfig, redis_url: str, num_prompts: int = 20_000) -> None:
        self.config = config
        self.watch = Watch()
        self.parts: dict[str, Part] = {}
        self._started: list[Part] = []
        self._redis_url = redis_url
        self._num_prompts = num_prompts
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> FleetRun:
        self.config.folder.mkdir(parents=True)
        self.config_file = self.config.folder / "config.yaml"
        self.config_file.write_text(dump_config(self.config))
        self.ask(self._submit)
        for target in (self._follow_states, self._follow_groups):
            thread = threading.Thread(target=target, name=target.__name__)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        for part in self._started:
            part.end()
        self._ending.set()
        with contextlib.closing(redis.Redis.from_url(self._redis_url)) as client:
            client.ping()  # MONITOR wakes up when it sees a command
        for thread in self._threads:
            thread.join(timeout=60)

    # ── parts ──

    def start_server(self, server_id: str, *overrides: str) -> Part:
        return self._start(server_id, "penstock_rollout", "--server-id", server_id, *overrides)

    def start_learner(self, *overrides: str, name: str = "learner") -> Part:
        return self._start(name, "penstock_learner", *overrides)

    def _start(self, name: str, module: str, *arguments: str) -> Part:
        command = [sys.executable, "-m", module, "--config", str(self.config_file), *arguments]
        part = self.parts[name] = Part(name, command, self.config.folder / f"{name}.log")
        self._started.append(part)
        return part

    # ── waiting ──

    def until(self, found: Callable[[], T], about: str, timeout_s: float = START_S) -> T:
        """Poll until `found` returns something true, and return that. Fail at the deadline, or if a part ends that may
        not."""
        deadline, listed_at = time.monotonic() + timeout_s, -math.inf
        while not (result := found()):
            if time.monotonic() > listed_at + LISTING_S:
                listed_at = time.monotonic()
                for part in self.parts.values():
                    part.tree()
            for part in self.parts.values():
                is_well = part.may_end or part.process.poll() is None
                assert is_well, self.report(f"{part.name} ended while the test waited for {about}")
            assert time.monotonic() < deadline, self.report(f"waited {timeout_s:g} s for {about}")
            time.sleep(POLL_S)
        return result

    def until_serving(self, *server_ids: str, above: int = -1, timeout_s: float = START_S) -> None:
        """Wait until all of these servers are serving versions above `above`."""

        def serving() -> bool:
            servers = self.servers()
            return all(
                server_id in servers
                and servers[server_id].state in ("READY", "LOADING")
                and servers[server_id].policy_version > above
                for server_id in server_ids
            )

        self.until(serving, f"{', '.join(server_ids)} to serve a version above {above}", timeout_s)

    def report(self, problem: str) -> str:
        lines = [problem, *(str(server) for server in self.servers().values()), f"moves: {self.watch.moves[-20:]}"]
        for name, part in self.parts.items():
            lines += [f"── {name}.log (exit code {part.process.poll()})", part.output()[-LOG_TAIL:]]
        return "\n".join(lines)

    # ── looks ──

    def ask(self, question: Callable[[redis.asyncio.Redis], Awaitable[T]]) -> T:
        async def asked() -> T:
            client = connect(self.config.redis)
            try:
                return await question(client)
            finally:
                await client.aclose()

        return asyncio.run(asked())

    def servers(self) -> dict[str, ServerRecord]:
        servers = self.ask(lambda client: Fleet(client, self.config.run).servers())
        return {server.server_id: server for server in servers}

    def stat(self) -> QueueStat:
        return self.ask(lambda client: RedisReplayQueue(client, self.config.run, self.config.replay).stat())

    @property
    def current(self) -> int:
        """The version that was published last."""
        return self.stat().policy_version

    def policies(self) -> dict[int, policies_pb2.Policy]:
        found = self.ask(lambda client: PolicyRegistry(client, self.config.run).newest_first(None, 10_000))
        return {policy.policy_version: policy for policy in found}

    def redis_time_s(self) -> float:
        seconds, microseconds = self.ask(lambda client: client.time())
        return seconds + microseconds / 1e6

    # ── how ──

    async def _submit(self, client: redis.asyncio.Redis) -> None:
        queue = RedisReplayQueue(client, self.config.run, self.config.replay)
        prompts = itertools.islice(training_prompts(), self._num_prompts)
        while batch := list(itertools.islice(prompts, 1000)):
            await queue.submit([encode_prompt(prompt) for prompt in batch], [0] * len(batch), "")

    def _follow_states(self) -> None:
        """Record every write to the fleet registry, as Redis sees it, so that even the shortest state is noticed."""
        keys = RunKeys(self.config.run)
        moved = re.compile(rf"HSET {re.escape(keys.server_states)} (\S+) (\S+)$")
        reported = re.compile(rf"HSET {re.escape(keys.servers)} (\S+) (\{{.*\}})$")
        with contextlib.closing(redis.Redis.from_url(self._redis_url)) as client, client.monitor() as monitor:
            for seen in monitor.listen():
                if self._ending.is_set():
                    return
                if move := moved.match(seen["command"]):
                    self.watch.moves.append(Move(seen["time"], *move.groups()))
                elif report := reported.match(seen["command"]):
                    said = json.loads(report[2])
                    self.watch.reports.append(
                        Report(seen["time"], report[1], said["policy_version"], said["weights_digest"])
                    )

    def _follow_groups(self) -> None:
        async def follow() -> None:
            client = connect(self.config.redis)
            inspector = QueueInspector(client, self.config.run, self.config.replay)
            known: set[int] = set()
            while not self._ending.is_set():
                with contextlib.suppress(PenstockError):
                    ids = await inspector.queued_ids(include_delivered=True)
                    for queued in await inspector.groups([i for i in ids if i not in known]):
                        known.add(queued.prompt_id)
                        assert queued.group is not None, queued.problem
                        self.watch.groups[queued.prompt_id, queued.group.attempt] = queued.group
                    self.watch.conservation_errors.append((await inspector.queue.stat()).conservation_error)
                await asyncio.sleep(POLL_S)
            await client.aclose()

        asyncio.run(follow())


def training_prompts(num_samples: int = NUM_SAMPLES) -> Iterator[Prompt]:
    """The arithmetic problems, repeated for ever, with a seed per sample. Every fourth is sampled at a temperature at
    which the model rambles. A normal answer has only four tokens, so it is rarely in progress when a version changes.
    """
    answer, ramble = Sampling(temperature=1.0, max_tokens=8), Sampling(temperature=2.0, max_tokens=40)
    problems = list(read_prompts(EXAMPLE / "train.parquet", num_samples=num_samples, sampling=answer))
    for index, prompt in enumerate(itertools.cycle(problems)):
        sampling = ramble if index % 4 == 3 else answer
        yield replace(prompt, sampling=replace(sampling, seed=index * num_samples))


def start_server(config: RunConfig, name: str, parts: list[Part]) -> Part:
    """Start a rollout server as a process, and add it to `parts`."""
    path = config.folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump_config(config))
    command = [sys.executable, "-m", "penstock_rollout", "--config", str(path), "--server-id", name]
    part = Part(name, command, config.folder / f"{name}.log", {"OMP_NUM_THREADS": "1"})
    parts.append(part)
    return part


def counters(config: RunConfig, server_id: str) -> dict[str, float]:
    """The counters of a server's /metrics, by name and labels."""
    port = json.loads((config.folder / f"{server_id}.json").read_text())["metrics_port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}
