"""The fleet of bench/scale.py: its processes, the clients of its gateway, and the figures of its phases."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast

import httpx

from harness import Bar, Measurement, sized
from penstock.config.run import RunConfig

SUBMISSION = {"prompts": [{"messages": [{"role": "user", "content": "What is 17 + 25?"}], "num_samples": 8}]}
QUESTION = {"model": "scale", "prompt": "What is 17 + 25?", "max_tokens": 8}


def p99(times_s: list[float]) -> float:
    return statistics.quantiles(times_s, n=100)[98] if len(times_s) > 1 else 0.0


class GatewayClient:
    """Sends the same request again and again, and keeps how long each took."""

    def __init__(self, config: RunConfig, key: str, path: str, body: dict[str, Any], pause_s: float) -> None:
        self.url = f"http://127.0.0.1:{config.gateway.port}"
        self.key = key
        self.path = path
        self.body = body
        self.pause_s = pause_s
        self.times_s: list[float] = []

    @contextlib.asynccontextmanager
    async def running(self, at_once: int = 1) -> AsyncIterator[None]:
        headers = {"Authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60) as client:
            tasks = [asyncio.create_task(self._run(client)) for _ in range(at_once)]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in ended:
            if not isinstance(outcome, asyncio.CancelledError):
                raise RuntimeError(f"a client of the gateway failed: {outcome}")

    async def wait_for(self, num_answers: int, timeout_s: float) -> None:
        """Wait until so many requests were answered."""
        async with asyncio.timeout(timeout_s):
            while len(self.times_s) < num_answers:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def _run(self, client: httpx.AsyncClient) -> None:
        while True:
            started = time.perf_counter()
            answer = await client.post(self.path, json=self.body)
            assert answer.status_code == 200, answer.text
            self.times_s.append(time.perf_counter() - started)
            await asyncio.sleep(self.pause_s)


def submitting(config: RunConfig, key: str) -> GatewayClient:
    """Submits a prompt ten times a second."""
    return GatewayClient(config, key, "/v1/runs/-/prompts", SUBMISSION, 0.1)


def generating(config: RunConfig, key: str) -> GatewayClient:
    """Asks for a completion twenty times a second."""
    return GatewayClient(config, key, "/v1/completions", QUESTION, 0.05)


Part = Literal["redis_s", "gateway_s", "learner_s", "servers_s"]
NAMES: dict[Part, str] = {"redis_s": "Redis", "gateway_s": "gateway", "learner_s": "learner"}
MAX_GROWTH = 1.1
"""How much more a thing may cost in the largest fleet than in the smallest."""


@dataclass(frozen=True)
class Costs:
    """CPU time of one phase, in seconds, and how long it took."""

    redis_s: float = 0.0
    gateway_s: float = 0.0
    learner_s: float = 0.0
    servers_s: float = 0.0
    """The processes that simulate the servers took it. If it comes near that of all cores, `wall_s` measures them."""
    wall_s: float = 1.0

    def minus(self, before: Costs) -> Costs:
        return Costs(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))

    def rate(self, part: Part) -> float:
        return float(getattr(self, part)) / self.wall_s

    def beyond(self, idle: Costs, part: Part) -> float:
        """CPU time beyond what an idle run costs in the same time."""
        return float(getattr(self, part)) - idle.rate(part) * self.wall_s


@dataclass(frozen=True)
class Sample:
    """What one size of the fleet cost in one round."""

    idle: Costs
    waiting: Costs
    groups: Costs
    submissions: Costs
    silent: Costs
    calls: Costs
    pushes: Costs
    num_groups: int
    num_submissions: int
    num_calls: int
    num_pushes: int
    p99_s: Mapping[str, float] = field(default_factory=dict)
    """Wall time of each kind of call."""


P99_NAMES = {
    "lease": "admission (a lease)",
    "report": "membership (a report)",
    "submit": "submission (REST)",
    "generate": "generate call (REST)",
}


def measurements(
    rounds: Sequence[Sample], label: str, num_servers: int, base: Costs, slower: float
) -> list[Measurement]:
    """All measurements of one size. Costs of a second are those at the real intervals, which are `slower` times
    shorter."""

    def of(name: str, unit: str, values: list[float]) -> Measurement:
        return Measurement(f"{label}: {name}", unit, values)

    found: list[Measurement] = []
    judged: tuple[Part, ...] = ("redis_s", "learner_s")
    for part in judged:
        whose = NAMES[part]
        times = slower if part == "redis_s" else 1.0  # the learner looks at the fleet at its real interval
        found += [
            of(f"{whose}, CPU of a server", "µs/s",
               [times * 1e6 * (s.idle.rate(part) - base.rate(part)) / num_servers for s in rounds]),
            of(f"{whose}, CPU of a group", "µs",
               [1e6 * s.groups.beyond(s.idle, part) / s.num_groups for s in rounds]),
            of(f"{whose}, CPU of a push to a server", "µs",
               [1e6 * getattr(s.pushes, part) / s.num_pushes / num_servers for s in rounds]),
        ]  # fmt: skip
    found += [
        of("Redis, CPU of a server that waits", "µs/s",
           [slower * 1e6 * (s.waiting.rate("redis_s") - s.idle.rate("redis_s")) / num_servers for s in rounds]),
        of("gateway, CPU of a submission", "µs",
           [1e6 * s.submissions.beyond(s.idle, "gateway_s") / s.num_submissions for s in rounds]),
        of("gateway, CPU of a generate call", "µs",
           [1e6 * s.calls.beyond(s.silent, "gateway_s") / s.num_calls for s in rounds]),
        of("Redis, CPU of a generate call", "µs",
           [1e6 * s.calls.beyond(s.silent, "redis_s") / s.num_calls for s in rounds]),
        of("groups", "groups/s", [s.num_groups / s.groups.wall_s for s in rounds]),
        of("a push without bytes, wall", "s", [s.pushes.wall_s / s.num_pushes for s in rounds]),
        of("a push without bytes, CPU of the simulated servers", "s",
           [s.pushes.servers_s / s.num_pushes for s in rounds]),
        of("groups, cores that the simulated servers take", "cores", [s.groups.rate("servers_s") for s in rounds]),
    ]  # fmt: skip
    found += [
        of(f"{call}, wall, p99", "ms", [1000 * s.p99_s[name] for s in rounds]) for name, call in P99_NAMES.items()
    ]
    return found


JUDGED = (
    *(f"Redis, CPU of {what}" for what in ("a group", "a server", "a push to a server")),
    *(f"learner, CPU of {what}" for what in ("a group", "a server", "a push to a server")),
    "gateway, CPU of a submission",
    "gateway, CPU of a generate call",
    "Redis, CPU of a generate call",
)  # fmt: skip


def growth(name: str, small: Measurement, large: Measurement) -> Bar:
    """How much more the same thing costs at the larger size. A cost that is not above zero is noise, of a machine that
    was too busy to measure it, and meets no bar."""
    value = large.median / small.median if small.median > 0 and large.median > 0 else math.inf
    return Bar(name, value, MAX_GROWTH, at_most=True)


def fleet_bars(found: Sequence[Measurement], smallest: str, largest: str) -> list[Bar]:
    by_name = {each.name: each for each in found}
    return [
        growth(f"{name}, {largest} / {smallest}", by_name[f"{smallest}: {name}"], by_name[f"{largest}: {name}"])
        for name in JUDGED
    ]


PROCESSES = sized(2, 1)
START_TIMEOUT_S = 180.0


class FleetProcesses:
    """The processes that simulate a fleet of `count` servers, with `in_flight` groups in all."""

    def __init__(self, config_file: Path, count: int, in_flight: int, generate_s: float, slower: float) -> None:
        per_process, places = -(-count // PROCESSES), max(1, in_flight // count)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "scale_parts.servers", str(config_file), str(first),
                 str(min(per_process, count - first)), str(places), str(generate_s), str(slower)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )
            for first in range(0, count, per_process)
        ]  # fmt: skip

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    async def started(self) -> None:
        async with asyncio.timeout(START_TIMEOUT_S):
            await asyncio.gather(*(asyncio.to_thread(self._read, process) for process in self.processes))

    async def order(self, order: str) -> dict[str, float]:
        """`lease`: the servers lease prompts; `hold`: they only report; `silence`: they do not even report. Returns the
        slowest process's p99 of each kind of call since the last order."""
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


class Meter:
    """CPU time of Redis, of the gateway, of this process, and of those that simulate servers."""

    def __init__(self, redis_pid: int, gateway_pid: int) -> None:
        self.redis_pid = redis_pid
        self.gateway_pid = gateway_pid
        self.server_pids: Sequence[int] = ()

    def read(self) -> Costs:
        return Costs(
            redis_s=cpu_s(self.redis_pid),
            gateway_s=cpu_s(self.gateway_pid),
            learner_s=time.process_time(),
            servers_s=sum(map(cpu_s, self.server_pids)),
            wall_s=time.perf_counter(),
        )


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process that are alive."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9
