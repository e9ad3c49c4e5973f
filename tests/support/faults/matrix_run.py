"""One run of the fault matrix. Its parts are processes, which are started one by one and started again when they end.

`MatrixRun.until` does what Kubernetes does: it starts a part again that has ended with an error. Prompts are trained in
the order of their admission (`stale_policy: wait`), and samples depend on the prompt alone (steady_server.py). So the
state after step n is the same in every run, and a run with faults is compared with one without, bit by bit.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import psutil
import pyarrow.parquet as parquet
import redis.asyncio

from penstock.config.loading import dump_config, validate
from penstock.config.run import RunConfig
from penstock.errors import PenstockError
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import QueueStat
from penstock.store.fleet import SERVING_STATES, Fleet, PolicyRegistry, RunControl, ServerRecord
from penstock.store.keys import RunKeys
from penstock.store.redis_client import connect
from penstock_learner.checkpoints import shards_folder
from support.chaos.processes import LosingRedis
from support.faults.proxy import ProxyThread
from support.faults.steady_server import SAMPLE_S
from support.fleet_runs import EXAMPLE, Part
from support.learner_runs import state_hash
from support.processes import command_of, is_alive

GROUPS_PER_STEP = 4
NUM_STEPS = 60
"""Steps of the data. A row stops its run earlier, and compares the step at which it stopped."""
RESTART_S = 0.5
POLL_S = 0.1
START_S = 400.0
"""Deadline of a start, on a machine with much else to do."""
T = TypeVar("T")
FAULT_S = 5.0
"""Longer than the deadline of a Redis command, than a lease and than `weights.ready_timeout_s`."""
FAULTS: dict[str, tuple[str, ...]] = {
    "delay": ("delay", "0.3"),
    "cut": ("cut",),
    "half-open": ("half_open",),
    "black hole": ("black_hole",),
    "silent towards the server": ("one_way", "to_server"),
    "silent towards the client": ("one_way", "to_client"),
}

SERVERS = ("support.faults.steady_server", "support.faults.faulty_server")
"""Modules that are started as rollout servers."""

REWARD = """
import zlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(zlib.crc32(solution_str.encode()) % 2)
"""


def matrix_config(folder: Path, redis_url: str, **sections: Mapping[str, Any]) -> RunConfig:
    """The settings of a run, with deadlines short enough for a test. `sections` are merged into it."""
    fields: dict[str, Any] = {
        "run": "matrix",
        "run_dir": str(folder),
        "model": {"path": str(EXAMPLE / "model")},
        "redis": {"url": redis_url, "timeout_s": 3, "retry_s": 30},
        "dataset": {
            "file": str(folder / "prompts.parquet"), "shuffle": False, "num_samples": 2, "max_tokens": 8,
            "max_pending": 64,
        },
        "replay": {
            "groups_per_step": GROUPS_PER_STEP, "max_staleness": 2, "stale_policy": "wait", "lease_ttl_s": 4,
            "max_attempts": 20,
        },
        "rollout": {
            "max_concurrent_groups": 4,
            "engine": {"name": "torch", "max_model_len": 64},
            "reward": {"function_file": str(folder / "reward.py")},
        },
        "weights": {"ready_timeout_s": 4, "push_timeout_s": 8, "snapshot_every_steps": 5, "keep_snapshots": 2},
        "learner": {
            "num_steps": 0,
            "lr": 3e-4,
            "algorithm": {"correction": {"mode": "bypass"}, "kl": {"placement": "none"}},
            "checkpoint": {"every_steps": 3, "keep": 3},
            "batch_timeout_s": 120,
            "rank_timeout_s": 180,
            "max_logprob_mismatch_nats": 0,
        },
    }  # fmt: skip
    for name, section in sections.items():
        fields[name] = {**fields.get(name, {}), **section}
    return validate(fields, "test")


@dataclass(frozen=True)
class FaultFree:
    """A hash of the whole state of training (weights, optimizer, random numbers) after each step, without faults."""

    state_hashes: dict[int, str]


@dataclass
class Measured:
    """What a row of the matrix reports."""

    lost: int | None = None
    doubled: int | None = None
    recovery_s: float | None = None
    steps: int | None = None
    restarts: dict[str, int] = field(default_factory=dict)


class MatrixRun:
    """Enter it, start parts, make a fault, wait, and call `stop_and_check`. Leaving it ends every process."""

    def __init__(self, folder: Path, *, sample_s: float = 1.0, seed: int = 0, **sections: Mapping[str, Any]) -> None:
        self.redis = LosingRedis(folder / "redis", seed)
        self.config = matrix_config(folder, self.redis.url, **sections)
        self.random = random.Random(seed)
        self.sample_s = sample_s
        self.parts: dict[str, Part] = {}
        self.measured = Measured()
        self.conservation_errors: set[int] = set()
        self._all_parts: list[Part] = []
        self._starts: dict[str, Callable[[], Part]] = {}
        self._ended_at: dict[str, float] = {}
        self._fault_at = 0.0
        self.rows: list[dict[str, Any]] = []
        """What was measured of each fault, if the run has several."""

    def __enter__(self) -> MatrixRun:
        folder = self.config.run_dir
        self.config.folder.mkdir(parents=True)
        table = parquet.read_table(EXAMPLE / "train.parquet")
        parquet.write_table(table.slice(0, GROUPS_PER_STEP * NUM_STEPS), folder / "prompts.parquet")
        (folder / "reward.py").write_text(REWARD)
        self.redis.start()
        return self

    def __exit__(self, *_: object) -> None:
        for part in self._all_parts:
            part.end()
        self.redis.kill()

    # ── parts ──

    def start(self, *names: str) -> None:
        """Start `feed`, `gateway`, `learner`, or rollout servers by any other name."""
        for name in names:
            module = {
                "feed": "penstock.cli.commands.feed",
                "learner": "penstock_learner",
                "gateway": "penstock_services.gateway",
            }
            self.start_part(name, module.get(name, "support.faults.steady_server"))

    def start_part(
        self, name: str, module: str, config: RunConfig | None = None, environment: Mapping[str, str] | None = None
    ) -> Part:
        """Start a process under supervision, with a config of its own if one is given."""
        path = self.config.folder / f"{name}.yaml"
        path.write_text(dump_config(config or self.config))
        words = ["--server-id", name] if module in SERVERS else []
        command = [sys.executable, "-m", module, "--config", str(path), *words]
        own = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), SAMPLE_S: str(self.sample_s)}

        def start() -> Part:
            part = Part(name, command, self.config.folder / f"{name}.log", own | dict(environment or {}))
            self._all_parts.append(part)
            self.parts[name] = part
            return part

        self._starts[name] = start
        return start()

    def through(self, proxy: ProxyThread, sections: Mapping[str, Any] = MappingProxyType({})) -> RunConfig:
        """A config whose Redis is behind a proxy, for one part. `sections` replace sections of the config."""
        url = self.redis.url.replace(f":{self.redis.port}/", f":{proxy.port}/")
        proxied = self.config.redis.model_copy(update={"url": url})
        return self.config.model_copy(update={"redis": proxied, **sections})

    def start_all(self) -> None:
        """Start a run of two servers, and wait until both serve versions that this learner has trained."""
        self.start("feed", "a", "b", "learner")
        self.until_step(3)
        self.until_serving("a", "b")

    def supervise(self) -> None:
        """Start parts again that have ended with an error, a moment later."""
        self.redis.sample()
        for name, part in list(self.parts.items()):
            part.tree()
            code = part.process.poll()
            if code is None or (code == 0 and name in ("feed", "learner")) or part.may_end:
                continue
            ended_at = self._ended_at.setdefault(name, time.monotonic())
            if time.monotonic() - ended_at >= RESTART_S:
                del self._ended_at[name]
                self.measured.restarts[name] = self.measured.restarts.get(name, 0) + 1
                self._starts[name]()

    def kill(self, name: str) -> None:
        """SIGKILL to a part, which is then started again."""
        part = self.parts[name]
        part.kill()
        part.may_end = False

    # ── time ──

    def fault(self) -> None:
        """Note the time of the fault."""
        self._fault_at = time.monotonic()

    def recovered(self) -> None:
        """Note how long ago the fault was."""
        self.measured.recovery_s = time.monotonic() - self._fault_at

    def recovered_from(self, fault: str, how: str) -> None:
        """Note a fault of several, which has a row of its own, and how long ago it was."""
        self.rows.append({"fault": fault, "how": how, "recovery_s": time.monotonic() - self._fault_at})

    def pause(self, seconds: float) -> None:
        """Let the run go on, supervised, for some time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.supervise()
            time.sleep(min(POLL_S, seconds))

    # ── waiting ──

    def until(self, found: Callable[[], T], about: str, timeout_s: float = 120) -> T:
        """Poll until `found` returns something true, and start parts again meanwhile. Fails at the deadline."""
        deadline = time.monotonic() + timeout_s
        while not (result := found()):
            assert time.monotonic() < deadline, self.report(f"waited {timeout_s:g} s for {about}")
            self.supervise()
            time.sleep(POLL_S)
        return result

    def until_step(self, step: int, timeout_s: float = START_S) -> None:
        self.until(lambda: self.step >= step, f"step {step}", timeout_s)

    def until_more_steps(self, more: int, timeout_s: float = 120) -> None:
        self.until_step(min(NUM_STEPS, self.step + more), timeout_s)

    def until_serving(self, *server_ids: str, above: int = 0, timeout_s: float = START_S) -> None:
        def serving() -> bool:
            servers = self.servers()
            found = [servers[server_id] for server_id in server_ids if server_id in servers]
            return len(found) == len(server_ids) and all(
                server.state in SERVING_STATES and server.policy_version > above for server in found
            )

        self.until(serving, f"{', '.join(server_ids)} to serve a version above {above}", timeout_s)

    def report(self, problem: str) -> str:
        lines = [problem, f"steps {self.step}, {self.stat()}", *map(str, self.servers().values())]
        for name, part in self.parts.items():
            lines += [f"── {name}.log (exit code {part.process.poll()})", part.output()[-2500:]]
        return "\n".join(lines)

    # ── looks ──

    def ask(self, question: Callable[[redis.asyncio.Redis], Awaitable[T]]) -> T | None:
        """The answer of Redis, past any proxy. None while it does not answer."""

        async def asked() -> T | None:
            client = connect(self.config.redis)
            try:
                return await question(client)
            except PenstockError:
                return None
            finally:
                await client.aclose()

        return asyncio.run(asked())

    def stat(self) -> QueueStat | None:
        stat = self.ask(lambda client: RedisReplayQueue(client, self.config.run, self.config.replay).stat())
        if stat is not None:
            self.conservation_errors.add(stat.conservation_error)
        return stat

    @property
    def step(self) -> int:
        """The step of the newest published version, or -1 while Redis does not answer."""
        stat = self.stat()
        return -1 if stat is None else stat.step

    def servers(self) -> dict[str, ServerRecord]:
        servers = self.ask(lambda client: Fleet(client, self.config.run).servers())
        return {server.server_id: server for server in servers or []}

    def published_digests(self) -> set[str]:
        """The digests of the weights of every version that was published."""
        found = self.ask(lambda client: PolicyRegistry(client, self.config.run).newest_first(None, 10_000))
        return {policy.weights_digest for policy in found or []}

    def log(self, name: str) -> str:
        """The whole log of a part, over all its starts."""
        return (self.config.folder / f"{name}.log").read_text(errors="replace")

    def ranks(self, worker: str = "Policy") -> list[psutil.Process]:
        """The processes of the learner that are ranks of a role."""
        found = [each for each in self.parts["learner"].tree() if f"ray::{worker}" in " ".join(command_of(each))]
        return [each for each in found if is_alive(each)]

    # ── the end ──

    def stop_learner(self) -> None:
        """Order a stop, and wait until the learner has ended with a checkpoint of everything it trained."""
        self.ask(lambda client: RunControl(client, self.config.run).stop())
        learner = self.parts["learner"]
        self.until(lambda: learner.process.poll() == 0 or self.parts["learner"].process.poll() == 0, "a clean stop")

    def committed_step(self) -> int:
        """The step of the newest checkpoint whose groups were acknowledged."""
        key = RunKeys(self.config.run).counters
        found = self.ask(lambda client: client.hget(key, "committed_step"))
        return int(found or 0)

    def newest_checkpoint(self) -> tuple[int, Path]:
        folders = (self.config.folder / "checkpoints").glob("term-*-step-*")
        newest = max(folders, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])
        return int(json.loads((newest / "trainer.json").read_text())["step"]), newest

    def stop_and_check(self, fault_free: FaultFree | None) -> None:
        """End the run. Check that no group was lost or trained twice, that nothing was ever unaccounted for, and that
        the state is the one of the run without faults."""
        self.stop_learner()
        step, newest = self.newest_checkpoint()
        ledger = json.loads((newest / "trainer.json").read_text())["ledger"]
        stat = self.stat()
        assert stat is not None
        num_covered = sum(last - first + 1 for first, last in ledger)
        self.measured.steps = step
        self.measured.lost = GROUPS_PER_STEP * step - num_covered
        self.measured.doubled = stat.trained - num_covered
        assert (self.measured.lost, self.measured.doubled) == (0, 0), (ledger, stat)
        assert self.conservation_errors == {0}
        if fault_free is not None:
            assert ledger == [[1, GROUPS_PER_STEP * step]]
            assert stat.dead_lettered == 0, stat
            found = state_hash(shards_folder(newest, "policy"))
            assert found == fault_free.state_hashes[step], f"the state after step {step} differs"


def run_without_faults(folder: Path, num_ranks: int = 1) -> FaultFree:
    """Train all data once, and keep a checkpoint of every step."""
    checkpoint = {"every_steps": 1, "keep": NUM_STEPS + 1}
    policy = {"num_ranks": num_ranks, "cpus_per_rank": 1 / num_ranks}
    learner = {"num_steps": NUM_STEPS, "checkpoint": checkpoint, "policy": policy}
    with MatrixRun(folder, sample_s=0.0, learner=learner) as run:
        run.start("feed", "a", "learner")
        run.until(lambda: run.parts["learner"].process.poll() is not None, "the run without faults", timeout_s=400)
        assert run.parts["learner"].process.returncode == 0, run.report("the run without faults failed")
        hashes = {}
        for path in (run.config.folder / "checkpoints").glob("term-*-step-*"):
            step = int(json.loads((path / "trainer.json").read_text())["step"])
            hashes[step] = state_hash(shards_folder(path, "policy"))
    assert len(set(hashes.values())) == NUM_STEPS, "every step changes the state"
    return FaultFree(hashes)


def make_faults(run: MatrixRun, proxy: ProxyThread, link: str, has_recovered: Callable[[], None]) -> None:
    """Make every fault on the link, and wait after each until `has_recovered` returns."""
    for name, (call, *words) in FAULTS.items():
        before = proxy.proxy.num_connections
        proxy.do(call, *(float(word) if call == "delay" else word for word in words))
        run.pause(FAULT_S)
        proxy.do("heal")
        run.fault()
        has_recovered()
        run.recovered_from(f"{link}: {name}", f"a proxy on the link, {FAULT_S:g} s")
        print(f"{link}: {name}: {proxy.proxy.num_connections - before} new connections")
