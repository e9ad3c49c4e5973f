"""The processes of bench/scale.py: those that simulate servers, and the CPU time of all."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from scale_parts.figures import Costs

PROCESSES = 2
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
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9
