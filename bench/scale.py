"""What a group and a server cost the shared parts of a run, with 10 to 1,000 servers and up to 8 million prompts.

    make bench-scale                       (ARGS="--servers 10 100 --prompts 100000 --rounds 1" for a short one)

One Redis, one gateway and the learner's side of the control: the queue's calls of a step, the publication of versions
to the fleet with its gRPC calls, and its look-out for servers that are behind. The servers are real but for their
engines (bench/scale_servers.py). All sizes of the fleet make the same number of groups a second, so that a difference
in the cost of a group is that of the fleet's size.

Four phases for each size of the fleet, in an order that is reversed in every other round:

    idle      servers report, and do not lease. Cost of a server, for each second
    waiting   the run is paused, and servers also look for prompts. Cost of looking, for each second
    groups    leases, appends, steps. Cost of a group, without that of the servers
    pushes    versions without bytes, to all servers. Cost of a push, for each server

Costs are CPU time, of Redis and of this process, which is the learner. Two cores cannot simulate 1,000 servers at their
real intervals: they report and look SLOWER times less often. Costs of a second are given for the real intervals.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
from prometheus_client import CollectorRegistry

from harness import Bar, Measurement, report
from penstock.codec import encode_prompt
from penstock.config.loading import dump_config
from penstock.config.run import ModelConfig, RunConfig, WeightsConfig
from penstock.config.service import GatewayConfig, RedisConfig, ReplayConfig
from penstock.ports import free_port, wait_for_port
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.store.fleet import SERVING_STATES, Fleet
from penstock.store.redis_client import connect
from penstock.store.run_control import RunControl
from penstock.trajectory import Prompt, Sampling
from penstock.v1 import weights_pb2
from penstock.weights.cluster_key import ClusterKey
from penstock_learner.loop.batch_reader import GATHER_S, WAIT_S
from penstock_learner.loop.policy_publication import PolicyPublication
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.weights.member_calls import MemberCalls
from penstock_learner.weights.push_report import PushReport
from penstock_learner.weights.senders.sender import PushTarget
from penstock_services.local.private_redis import find_redis_server, write_config

HERE = Path(__file__).parent
SLOWER = 5
IN_FLIGHT = 1_000
"""Groups that all servers together work on. Each server has its share of places."""
GENERATE_S = 10.0
GROUPS_PER_STEP = 100
PROCESSES = 2
PROMPTS_AT_ONCE = 2_000
KEY = "a-key-for-the-benchmark"
START_TIMEOUT_S = 180.0


@dataclass
class Costs:
    """CPU time of one phase, in seconds."""

    redis_s: float
    learner_s: float
    wall_s: float


@dataclass
class Sample:
    """What one size of the fleet cost in one round."""

    idle: Costs
    waiting: Costs
    groups: Costs
    pushes: Costs
    num_groups: int
    num_pushes: int
    push_s: float
    p99_s: dict[str, float] = field(default_factory=dict)


class Meter:
    """CPU time of Redis, with its threads, and of this process."""

    def __init__(self, redis_pid: int) -> None:
        self.redis_pid = redis_pid

    def read(self) -> tuple[float, float, float]:
        redis_ns = sum(
            int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{self.redis_pid}/task").iterdir()
        )
        return redis_ns / 1e9, time.process_time(), time.perf_counter()

    def since(self, before: tuple[float, float, float]) -> Costs:
        return Costs(*(now - then for now, then in zip(self.read(), before, strict=True)))


class NoWeights:
    """Stands in for the policy's ranks: makes the calls of a push, and sends no bytes."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.calls = MemberCalls(config)
        self.term = 0

    async def call_all(self, method: str, *arguments: Any) -> None: ...

    async def call_beside(
        self, lane: str, method: str, policy_version: int, targets: Sequence[PushTarget], *_: Any, timeout_s: float
    ) -> PushReport:
        return await asyncio.to_thread(self._push, policy_version, targets)

    def _push(self, policy_version: int, targets: Sequence[PushTarget]) -> PushReport:
        result = PushReport(policy_version, "gloo")
        manifest = weights_pb2.WeightManifest(run=self.config.run, policy_version=policy_version, term=self.term)
        requests = [
            weights_pb2.AnnounceRequest(
                manifest=manifest, transport="gloo", rendezvous="-", rank=rank, world_size=len(targets) + 1,
                deadline_s=self.config.weights.push_timeout_s,
            )
            for rank, _ in enumerate(targets, 1)
        ]  # fmt: skip
        _, result.failed = self.calls.announce(targets, requests)
        request = weights_pb2.CommitRequest(
            policy_version=policy_version, term=self.term, deadline_s=self.config.weights.push_timeout_s
        )
        ready = [target for target in targets if target.server_id not in result.failed]
        responses, failed = self.calls.commit(ready, request)
        result.committed, result.failed = sorted(responses), result.failed | failed
        return result


class Servers:
    """The processes that simulate a fleet."""

    def __init__(self, config_file: Path, count: int) -> None:
        per_process, places = -(-count // PROCESSES), max(1, IN_FLIGHT // count)
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / "scale_servers.py"), str(config_file), str(first),
                 str(min(per_process, count - first)), str(places), str(GENERATE_S), str(SLOWER)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=None,
            )
            for first in range(0, count, per_process)
        ]  # fmt: skip

    async def started(self) -> None:
        async with asyncio.timeout(START_TIMEOUT_S):
            await asyncio.gather(*(asyncio.to_thread(self._read, process) for process in self.processes))

    async def order(self, order: str) -> dict[str, float]:
        """`lease`: the servers lease prompts; `hold`: they do not. Returns the slowest process's p99 of each kind of
        call since the last order."""
        answers = await asyncio.gather(*(asyncio.to_thread(self._ask, process, order) for process in self.processes))
        return {name: max(answer[name] for answer in answers) for name in answers[0]}

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def _ask(self, process: subprocess.Popen[str], order: str) -> dict[str, float]:
        assert process.stdin is not None
        process.stdin.write(order + "\n")
        process.stdin.flush()
        return self._read(process)

    def _read(self, process: subprocess.Popen[str]) -> dict[str, float]:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "a process of servers has ended; see its error above"
        return cast("dict[str, float]", json.loads(line))


class Learner:
    """The learner's side of the control."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.client = connect(config.redis)
        self.queue = RedisReplayQueue(self.client, config.run, config.replay)
        self.fleet = Fleet(self.client, config.run)
        self.control = RunControl(self.client, config.run)
        self.weights = NoWeights(config)
        self.publication: PolicyPublication
        self.step = 1

    async def start(self) -> None:
        self.weights.term = await self.queue.take_term(0)
        metrics = LearnerMetrics(CollectorRegistry(), "none")
        self.publication = PolicyPublication(
            self.config, self.queue, self.fleet, self.weights, self.weights.term, metrics  # type: ignore[arg-type]
        )  # fmt: skip
        self.publication._snapshot_step = 0  # there are no weights to write

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Publish versions, and look out for servers that are behind, as a learner does all the time."""
        loops = (self.publication.publish_loop(), self.publication.catch_up_loop())
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def publish(self) -> None:
        """Bring a new version to all servers, and make it current."""
        offer = await self.publication.gather(await self.queue.allocate_version(0), self.step)
        offer.metrics.set_result({})
        await self.publication.wait_until_published()

    async def make_steps(self, seconds: float) -> int:
        """Take, fetch and commit batch after batch. Returns the number of groups."""
        ends_at, num_groups = time.perf_counter() + seconds, 0
        taken: list[int] = []
        while time.perf_counter() < ends_at:
            some = await self.queue.take(self.step + 1, GROUPS_PER_STEP - len(taken))
            assert len(await self.queue.fetch(some)) == len(some)
            taken += some
            if len(taken) < GROUPS_PER_STEP:
                if not some:
                    await self.queue.wait_for_groups(WAIT_S)
                    await asyncio.sleep(GATHER_S)
                continue
            self.step += 1
            await self.queue.commit(self.step, taken)
            await self.queue.publish(self.publication.current or 0, self.step, b"")
            num_groups += len(taken)
            taken = []
        await self.queue.commit(self.step + 1, taken)
        self.step += 1
        return num_groups + len(taken)

    async def wait_for_servers(self, count: int) -> None:
        """Wait until `count` servers serve, and no others are left from before."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                servers = await self.fleet.servers()
                if len(servers) == count and all(server.state in SERVING_STATES for server in servers):
                    return
                await asyncio.sleep(0.5)

    async def forget_servers(self) -> None:
        for server in await self.fleet.servers():
            await self.fleet.leave(server.server_id)
        self.weights.calls = MemberCalls(self.config)


class Scale:
    """One run whose fleet changes its size."""

    def __init__(self, config: RunConfig, config_file: Path, redis_pid: int, seconds: float) -> None:
        self.config = config
        self.config_file = config_file
        self.meter = Meter(redis_pid)
        self.learner = Learner(config)
        self.seconds = seconds
        self.baseline = Costs(0, 0, 1)

    async def fill(self, until: int) -> None:
        """Submit prompts until so many are pending."""
        prompt = Prompt(messages=(("user", "What is 17 + 25?"),), sampling=Sampling(max_tokens=64), num_samples=8)
        encoded = encode_prompt(prompt)
        pending = (await self.learner.queue.stat()).pending_prompts
        while pending < until:
            count = min(PROMPTS_AT_ONCE, until - pending)
            await self.learner.queue.submit([encoded] * count, [0] * count, "")
            pending += count

    async def measure_baseline(self) -> None:
        """What Redis and this process cost without any server."""
        before = self.meter.read()
        await asyncio.sleep(self.seconds)
        self.baseline = self.meter.since(before)

    async def measure(self, num_servers: int) -> Sample:
        """All three phases with a new fleet of this size."""
        learner = self.learner
        await learner.control.pause()
        await learner.forget_servers()
        servers = Servers(self.config_file, num_servers)
        try:
            await servers.started()
            async with learner.running():
                await learner.publish()
                await learner.wait_for_servers(num_servers)
                idle = await self._pause()
                await servers.order("lease")
                waiting = await self._pause()
                await learner.control.resume()
                await learner.make_steps(GENERATE_S + self.seconds / 2)  # until groups come evenly
                await servers.order("lease")
                async with self._submitting() as submitting:
                    before = self.meter.read()
                    num_groups = await learner.make_steps(self.seconds)
                    groups = self.meter.since(before)
                p99_s = await servers.order("hold") | {"submit": submitting.p99_s}
                await learner.control.pause()
                before, num_pushes = self.meter.read(), 5
                for _ in range(num_pushes):
                    await learner.publish()
                pushes = self.meter.since(before)
                await learner.wait_for_servers(num_servers)
            return Sample(idle, waiting, groups, pushes, num_groups, num_pushes, pushes.wall_s / num_pushes, p99_s)
        finally:
            servers.end()

    async def _pause(self) -> Costs:
        before = self.meter.read()
        await asyncio.sleep(self.seconds)
        return self.meter.since(before)

    @contextlib.asynccontextmanager
    async def _submitting(self) -> AsyncIterator[Submitting]:
        """A client that submits prompts through the gateway, ten times a second."""
        submitting = Submitting(self.config)
        task = asyncio.create_task(submitting.run())
        yield submitting
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class Submitting:
    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.times_s: list[float] = []

    @property
    def p99_s(self) -> float:
        return statistics.quantiles(self.times_s, n=100)[98]

    async def run(self) -> None:
        url = f"http://127.0.0.1:{self.config.gateway.port}"
        body = {"prompts": [{"messages": [{"role": "user", "content": "What is 17 + 25?"}], "num_samples": 8}]}
        async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=30) as client:
            while True:
                started = time.perf_counter()
                answer = await client.post("/v1/runs/-/prompts", json=body)
                assert answer.status_code == 200, answer.text
                self.times_s.append(time.perf_counter() - started)
                await asyncio.sleep(0.1)


def judge(samples: dict[str, list[Sample]], sizes: dict[str, int], base: Costs) -> list[Measurement]:
    """Measurements of every size."""
    measured: dict[str, dict[str, Measurement]] = {}
    for label, rounds in samples.items():
        num_servers = sizes[label]

        def of(name: str, unit: str, values: list[float], label: str = label) -> None:
            measured.setdefault(name, {})[label] = Measurement(f"{label}: {name}", unit, values)

        def rate(costs: Costs, part: str) -> float:
            return cast("float", getattr(costs, part)) / costs.wall_s

        for part, whose in (("redis_s", "Redis"), ("learner_s", "learner")):
            scale = SLOWER if part == "redis_s" else 1  # the learner looks at the fleet at its real interval
            of(
                f"{whose}, CPU of a server", "µs/s",
                [scale * 1e6 * (rate(s.idle, part) - rate(base, part)) / num_servers for s in rounds],
            )  # fmt: skip
            of(
                f"{whose}, CPU of a group", "µs",
                [1e6 * (getattr(s.groups, part) - getattr(s.idle, part) / s.idle.wall_s * s.groups.wall_s)
                 / s.num_groups for s in rounds],
            )  # fmt: skip
            of(
                f"{whose}, CPU of a push to a server",
                "µs",
                [1e6 * getattr(s.pushes, part) / s.num_pushes / num_servers for s in rounds],
            )
        of(
            "Redis, CPU of a server that waits", "µs/s",
            [SLOWER * 1e6 * (rate(s.waiting, "redis_s") - rate(s.idle, "redis_s")) / num_servers for s in rounds],
        )  # fmt: skip
        of("groups", "groups/s", [s.num_groups / s.groups.wall_s for s in rounds])
        of("a push without bytes", "s", [s.push_s for s in rounds])
        for name, call in (("lease", "lease"), ("report", "membership report"), ("submit", "submission (REST)")):
            of(f"{call}, p99", "ms", [1000 * s.p99_s[name] for s in rounds])
    return [each for sized in measured.values() for each in sized.values()]


def fleet_bars(measurements: list[Measurement], first: str, last: str, names: Sequence[str]) -> list[Bar]:
    by_name = {each.name: each for each in measurements}
    return [
        Bar(
            f"{name}, {last} / {first}",
            by_name[f"{last}: {name}"].median / by_name[f"{first}: {name}"].median,
            1.1,
            True,
        )
        for name in names
    ]


async def run(scale: Scale, arguments: argparse.Namespace) -> tuple[list[Measurement], list[Bar]]:
    await scale.learner.start()
    few, *more = arguments.prompts
    await scale.fill(few)
    await scale.measure_baseline()
    sizes = {f"{count:,} servers": count for count in arguments.servers}
    samples: dict[str, list[Sample]] = {label: [] for label in sizes}
    for index in range(arguments.rounds):
        for label in list(sizes)[:: -1 if index % 2 else 1]:
            samples[label].append(await scale.measure(sizes[label]))
            print(f"round {index + 1}, {label}: {samples[label][-1]}", flush=True)
    measurements = judge(samples, sizes, scale.baseline)
    smallest, largest = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    names = [
        f"{whose}, CPU of {what}"
        for what in ("a group", "a server", "a push to a server")
        for whose in ("Redis", "learner")
    ]
    bars = fleet_bars(measurements, smallest, largest, names)
    middle = arguments.servers[len(arguments.servers) // 2]
    for count in more:
        await scale.fill(count)
        label = f"{count:,} prompts, {middle:,} servers"
        found = [await scale.measure(middle) for _ in range(arguments.rounds)]
        print(label, found, flush=True)
        queued = judge({label: found}, {label: middle}, scale.baseline)
        measurements += queued
        bars += [
            Bar(
                f"Redis, CPU of a group, {count:,} prompts / {few:,}",
                next(m for m in queued if "Redis, CPU of a group" in m.name).median
                / next(m for m in measurements if m.name == f"{middle:,} servers: Redis, CPU of a group").median,
                1.1,
                True,
            )
        ]
    return measurements, bars


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--servers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--prompts", type=int, nargs="+", default=[1_000_000, 8_000_000])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15.0, help="length of a phase")
    arguments = parser.parse_args()
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        redis_port = free_port()
        redis_config, url = write_config(folder / "redis", redis_port)
        config = RunConfig(
            run="scale", run_dir=folder, model=ModelConfig(path=folder), redis=RedisConfig(url=url, timeout_s=30),
            gateway=GatewayConfig(port=free_port(), grpc_port=free_port(), api_key_file=folder / "key"),
            replay=ReplayConfig(
                groups_per_step=GROUPS_PER_STEP, max_staleness=4 * IN_FLIGHT // GROUPS_PER_STEP, lease_ttl_s=60
            ),
            weights=WeightsConfig(transport="gloo", catch_up="publisher", snapshot_every_steps=10**9),
        )  # fmt: skip
        (folder / "key").write_text(KEY)
        config.folder.mkdir(parents=True, exist_ok=True)
        ClusterKey.of(config).make_if_missing()
        config_file = folder / "run.yaml"
        config_file.write_text(dump_config(config))
        gateway = [sys.executable, "-m", "penstock_services.gateway", "--config", str(config_file)]
        try:
            redis = subprocess.Popen([find_redis_server(), str(redis_config)], stdout=subprocess.DEVNULL)
            processes.append(redis)
            assert wait_for_port("127.0.0.1", redis_port, timeout_s=20)
            processes.append(subprocess.Popen(gateway, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            assert wait_for_port("127.0.0.1", config.gateway.port, timeout_s=60)
            scale = Scale(config, config_file, redis.pid, arguments.seconds)
            measurements, bars = asyncio.run(run(scale, arguments))
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return 0 if report("scale", "a run with many servers, 2 cores", measurements, bars) else 1


if __name__ == "__main__":
    raise SystemExit(main())
