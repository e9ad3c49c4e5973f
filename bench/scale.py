"""What a group and a server cost the shared parts of a run, with 10 to 1,000 servers and up to 8 million prompts.

    make bench-scale                       (ARGS="--servers 10 100 --prompts 100000 --rounds 1" for a short one)

One Redis, one gateway and the learner's side of the control (scale_parts/learner.py): the queue's calls of a step, the
publication of versions to the fleet with its gRPC calls, and its search for servers that are behind. The servers are
real but for their engines (scale_parts/servers.py). All sizes of the fleet make the same number of groups a second, so
that a difference in the cost of a group is that of the fleet's size.

Phases for each size of the fleet, in an order of sizes that is reversed in every other round:

    idle      servers report, and do not lease. Cost of a server, for each second
    waiting   the run is paused, and servers also look for prompts. Cost of looking, for each second
    groups    leases, appends and steps. Cost of a group
    submits   the same with a client that submits prompts to the gateway. Cost of a submission
    silent    servers neither report nor lease. What their connections cost is not part of the two costs below
    calls     clients that ask the gateway for completions. Cost of a call
    pushes    versions without bytes, to all servers. Cost of a push, for each server

In the last three phases the servers do not report, because two cores would spend more on that than on what is measured.

Costs are CPU time: of Redis, of the gateway, and of this process, which is the learner. They do not depend on how fast
the servers are simulated. Wall times do: two cores simulate 1,000 servers here, and the figures name the time that this
takes. Servers report and look for prompts `--slower` times less often; costs of a second are given for the real
intervals.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
from pathlib import Path

from harness import Bar, Measurement, gateway_process, make_parser, redis_process, report, sized
from penstock.codec import encode_prompt
from penstock.config.run import ModelConfig, RunConfig, WeightsConfig
from penstock.config.service import GatewayConfig, RedisConfig, ReplayConfig
from penstock.internal_calls import ClusterKey
from penstock.machine import free_port, measure_memory
from penstock.trajectory import Prompt, Sampling
from scale_parts.fleet import (
    Costs,
    FleetProcesses,
    GatewayClient,
    Meter,
    Sample,
    fleet_bars,
    generating,
    growth,
    measurements,
    p99,
    submitting,
)
from scale_parts.learner import Learner

IN_FLIGHT = 1_000
"""Groups that all servers together work on. Each server has its share of places."""
GROUPS_PER_STEP = 100
PROMPTS_AT_ONCE = 2_000
PROMPT_BYTES = 600
"""Memory that a pending prompt takes in Redis, rounded up; with the copies of a rewrite of the append-only file."""
NUM_PUSHES = 5
CALLS_AT_ONCE = 8
CONNECT_TIMEOUT_S = 120.0
SETTLE_S = 2.5
"""Longer than the time between two looks of a server for what became of its groups."""
KEY = "a-key-for-the-benchmark"


class Scale:
    """One run whose fleet changes its size."""

    def __init__(self, config: RunConfig, config_file: Path, meter: Meter, arguments: argparse.Namespace) -> None:
        self.config = config
        self.config_file = config_file
        self.meter = meter
        self.learner = Learner(config)
        self.seconds: float = arguments.seconds
        self.generate_s: float = arguments.generate_s
        self.slower: float = arguments.slower
        self.baseline = Costs()

    async def fill(self, until: int) -> Measurement:
        """Submit prompts until so many are pending. Returns the memory that one takes in Redis."""
        prompt = Prompt(messages=(("user", "What is 17 + 25?"),), sampling=Sampling(max_tokens=64), num_samples=8)
        encoded = encode_prompt(prompt)
        queue, client = self.learner.queue, self.learner.client
        before, pending = (await client.info("memory"))["used_memory"], (await queue.stat()).pending_prompts
        needed, memory = PROMPT_BYTES * (until - pending), measure_memory()
        if memory is not None and needed > memory.available_bytes:
            raise SystemExit(f"{until:,} prompts need {needed / 2**30:.1f} GiB, more than is available; ask for fewer")
        added = until - pending
        while pending < until:
            count = min(PROMPTS_AT_ONCE, until - pending)
            await queue.submit([encoded] * count, [0] * count, "")
            pending += count
        used = (await client.info("memory"))["used_memory"] - before
        return Measurement(f"{until:,} prompts: Redis, memory of a prompt", "bytes", [used / max(added, 1)])

    async def measure_baseline(self) -> None:
        """What Redis and this process cost without any server."""
        self.baseline = await self._pause()

    async def measure(self, num_servers: int) -> Sample:
        """All phases with a new fleet of this size."""
        await self.learner.control.pause()
        await self.learner.forget_servers()
        servers = FleetProcesses(self.config_file, num_servers, IN_FLIGHT, self.generate_s, self.slower)
        self.meter.server_pids = servers.pids
        try:
            await servers.started()
            async with self.learner.running():
                return await self._measure(servers, num_servers)
        finally:
            self.meter.server_pids = ()
            servers.end()

    async def _measure(self, servers: FleetProcesses, num_servers: int) -> Sample:
        learner = self.learner
        await learner.publish()
        await learner.wait_for_servers(num_servers)
        idle = await self._pause()
        await servers.order("lease")
        waiting = await self._pause()
        await learner.control.resume()
        await learner.make_steps(self.generate_s + self.seconds / 2)  # until groups come evenly
        await servers.order("lease")
        before, num_groups = self.meter.read(), 0
        while not num_groups:  # a machine that is busy elsewhere may make none in the time of a smoke run
            num_groups = await learner.make_steps(self.seconds)
        groups = self.meter.read().minus(before)
        client = submitting(self.config, KEY)
        before = self.meter.read()
        async with client.running():
            await learner.make_steps(self.seconds)
            await client.wait_for(1, CONNECT_TIMEOUT_S)
            submissions = self.meter.read().minus(before)
            num_submissions = len(client.times_s)
        p99_s = await servers.order("hold") | {"submit": p99(client.times_s)}
        await learner.make_steps(2 * self.generate_s + SETTLE_S)  # until no server has a group that is not committed
        await learner.control.pause()
        await servers.order("silence")
        silent = await self._pause()
        caller = generating(self.config, KEY)
        async with caller.running(CALLS_AT_ONCE):
            # The gateway connects to a server at its first call, and twice as many calls as servers reach all of them.
            await caller.wait_for(2 * num_servers, CONNECT_TIMEOUT_S)
            caller.times_s.clear()
            calls = await self._pause(until_one_call_of=caller)
            num_calls, p99_s["generate"] = len(caller.times_s), p99(caller.times_s)
        before = self.meter.read()
        for _ in range(NUM_PUSHES):
            await learner.publish()
        pushes = self.meter.read().minus(before)
        await servers.order("hold")
        await learner.wait_for_servers(num_servers)
        return Sample(
            idle, waiting, groups, submissions, silent, calls, pushes, num_groups, num_submissions, num_calls,
            NUM_PUSHES, p99_s,
        )  # fmt: skip

    async def _pause(self, until_one_call_of: GatewayClient | None = None) -> Costs:
        before = self.meter.read()
        await asyncio.sleep(self.seconds)
        if until_one_call_of is not None:
            await until_one_call_of.wait_for(1, CONNECT_TIMEOUT_S)
        return self.meter.read().minus(before)


async def run(scale: Scale, arguments: argparse.Namespace) -> tuple[list[Measurement], list[Bar]]:
    await scale.learner.start()
    few, *more = arguments.prompts
    memory = [await scale.fill(few)]
    await scale.measure_baseline()
    sizes = {f"{count:,} servers": count for count in arguments.servers}
    samples: dict[str, list[Sample]] = {label: [] for label in sizes}
    for index in range(arguments.rounds):
        for label in list(sizes)[:: -1 if index % 2 else 1]:
            samples[label].append(await scale.measure(sizes[label]))
            print(f"round {index + 1}, {label}: {samples[label][-1]}", flush=True)
    found: list[Measurement] = []
    for label, rounds in samples.items():
        found += measurements(rounds, label, sizes[label], scale.baseline, scale.slower)
    *smaller, largest = sorted(sizes, key=sizes.__getitem__)
    bars = [bar for small in smaller for bar in fleet_bars(found, small, largest)]
    middle = arguments.servers[len(arguments.servers) // 2]
    [with_few] = [each for each in found if each.name == f"{middle:,} servers: Redis, CPU of a group"]
    for count in more:
        memory.append(await scale.fill(count))
        label = f"{count:,} prompts, {middle:,} servers"
        queued = [await scale.measure(middle) for _ in range(arguments.rounds)]
        print(label, queued, flush=True)
        with_many = measurements(queued, label, middle, scale.baseline, scale.slower)
        [of_group] = [each for each in with_many if each.name == f"{label}: Redis, CPU of a group"]
        bars.append(growth(f"Redis, CPU of a group, {count:,} prompts / {few:,}", with_few, of_group))
        found += with_many
    return found + memory, bars


def main() -> int:
    parser = make_parser()
    parser.add_argument("--servers", type=int, nargs="+", default=sized([10, 100, 1000], [2, 4]))
    parser.add_argument("--prompts", type=int, nargs="+", default=sized([1_000_000, 4_000_000, 8_000_000], [20_000]))
    parser.add_argument("--rounds", type=int, default=sized(2, 1))
    parser.add_argument("--seconds", type=float, default=sized(15.0, 0.8), help="length of a phase")
    parser.add_argument("--generate-s", type=float, default=sized(10.0, 0.3), help="how long a server works on a group")
    parser.add_argument(
        "--slower", type=float, default=sized(5.0, 0.5), help="how much less often servers report than real ones"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        found, bars = measure_in(Path(folder), arguments)
    title = "a run with many servers, simulated on 2 cores"
    return 0 if report("scale", title, found, bars) else 1


def measure_in(folder: Path, arguments: argparse.Namespace) -> tuple[list[Measurement], list[Bar]]:
    """Start a Redis and a gateway, and measure."""
    with contextlib.ExitStack() as stack:
        redis_pid, url = stack.enter_context(redis_process(folder / "redis"))
        config = RunConfig(
            run="scale", run_dir=folder, model=ModelConfig(path=folder), redis=RedisConfig(url=url, timeout_s=30),
            gateway=GatewayConfig(port=free_port(), grpc_port=free_port(), api_key_file=folder / "key"),
            replay=ReplayConfig(
                groups_per_step=GROUPS_PER_STEP, max_staleness=4 * IN_FLIGHT // GROUPS_PER_STEP, lease_ttl_s=300
            ),
            weights=WeightsConfig(transport="gloo", catch_up="publisher", snapshot_every_steps=10**9),
        )  # fmt: skip
        (folder / "key").write_text(KEY)
        config.folder.mkdir(parents=True, exist_ok=True)
        ClusterKey.of(config).make_if_missing()
        config_file = folder / "run.yaml"
        gateway_pid = stack.enter_context(gateway_process(config, config_file))
        scale = Scale(config, config_file, Meter(redis_pid, gateway_pid), arguments)
        return asyncio.run(run(scale, arguments))


if __name__ == "__main__":
    raise SystemExit(main())
