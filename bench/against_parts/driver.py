"""Measures one part of the code that PYTHONPATH names, with the benchmark programs of that code.

`against.py` starts this file once for each tree of code, with one JSON argument, and writes a line to its stdin for
every turn. The answer is one JSON line: rates by name, where larger is better. The file must work with an older tree
too, so it uses only names that both trees have.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Rates = dict[str, float]


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and all its threads, ended ones too. The clock is that of clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


class Meter:
    """What a number of things cost: seconds of this process, and CPU seconds of every process that is named."""

    def __init__(self, unit: str, processes: dict[str, int]) -> None:
        self.unit = unit
        self.processes = processes

    def measure(self, name: str, count: float, run: Callable[..., object], *arguments: Any) -> Rates:
        before = {process: cpu_s(pid) for process, pid in self.processes.items()}
        started = time.perf_counter()
        run(*arguments)
        rates = {f"{name}, {self.unit}/s": count / (time.perf_counter() - started)}
        for process, pid in self.processes.items():
            rates[f"{name}, {self.unit} per CPU second of {process}"] = count / (cpu_s(pid) - before[process])
        return rates


def repeat(count: int, call: Callable[..., object], *arguments: Any) -> None:
    for _ in range(count):
        call(*arguments)


class Address(str):
    """A URL. Older programs expect an object that has one."""

    @property
    def url(self) -> str:
        return str(self)


class Queue:
    """Appending groups, reading and committing them, and both at once."""

    def __init__(self, url: str, redis_pid: int, num_batches: int, sizes: dict[str, int]) -> None:
        import replay

        self.count = num_batches * replay.BATCH
        self.clients: Any = replay.Clients(Address(url))
        self.queues = {
            label: replay.OurQueue(self.clients, f"queue-{num_bytes}", os.urandom(num_bytes))
            for label, num_bytes in sizes.items()
        }
        self.meter = Meter("groups", {"the client": os.getpid(), "Redis": redis_pid})

    def measure(self) -> Iterator[Rates]:
        measure, count = self.meter.measure, self.count
        for label, queue in self.queues.items():
            yield measure(f"{label}: append", count, self._run, queue.append, self._run(queue.submit, count))
            yield measure(f"{label}: read and commit", count, self._run, queue.read_and_commit, count)
            yield measure(f"{label}: whole cycle", count, self._run, queue.cycle, self._run(queue.submit, count))
        self.clients.rewrite_log()

    def _run(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return self.clients.run(method(*arguments))

    def close(self) -> None:
        self.clients.close()


class Weights:
    """A push by each transport, and the packing of a version into buckets."""

    def __init__(self, folder: str, num_bytes: int, num_pushes: int) -> None:
        import torch

        import weights

        torch.set_num_threads(1)
        self.num_pushes = num_pushes
        self.mb = num_bytes / 2**20
        tensors = weights.make_weights(num_bytes)
        self.pushers = {name: weights.Pusher(Path(folder) / name, name, 1, tensors) for name in ("shm", "gloo")}

    def measure(self) -> Iterator[Rates]:
        us = {"the learner": os.getpid()}
        for name, pusher in self.pushers.items():
            meter = Meter("MB", us | {"a member": pusher.members[0].process.pid})
            yield meter.measure(f"push by {name}", self.mb * self.num_pushes, repeat, self.num_pushes, pusher.push)
        pusher.version += 1
        yield Meter("MB", us).measure("packing", self.mb, pusher._stage)
        pusher.publisher.push(pusher.version, pusher.targets)

    def close(self) -> None:
        for pusher in self.pushers.values():
            pusher.stop()


class Codec:
    """Encoding and decoding of a group."""

    def __init__(self, num_groups: int) -> None:
        import codec

        self.codec: Any = codec
        self.num_groups = num_groups
        self.group = codec.make_group()
        self.frame = self.codec.encode_group(self.group)

    def measure(self) -> Iterator[Rates]:
        groups, count = Meter("groups", {"the process": os.getpid()}), self.num_groups
        yield groups.measure("encode", count, repeat, count, self.codec.encode_group, self.group)
        yield groups.measure("decode", count, repeat, count, self.codec.decode_group, self.frame)

    def close(self) -> None:
        pass


class Checkpoints:
    """Writing a checkpoint with its checksums, and verifying and loading it."""

    def __init__(self, folder: str, num_bytes: int) -> None:
        import warnings

        import torch

        import checkpoints

        warnings.simplefilter("ignore", UserWarning)  # DCP warns that one process saves and loads, and overwrites
        torch.set_num_threads(1)
        self.checkpoints: Any = checkpoints
        self.folder, self.mb = Path(folder) / "shards", num_bytes / 2**20
        self.state = {"model": {f"layer.{index}": torch.randn(num_bytes // 64) for index in range(16)}}
        self.records: Any = {}

    def measure(self) -> Iterator[Rates]:
        meter = Meter("MB", {"the rank": os.getpid()})
        yield meter.measure("save", self.mb, self._save)
        yield meter.measure(
            "verify and load", self.mb, self.checkpoints.verify_and_load, self.folder, self.records, self.state
        )

    def _save(self) -> None:
        writer = self.checkpoints.HashingWriter(self.folder)
        self.checkpoints.write(self.state, writer)
        self.records = writer.records

    def close(self) -> None:
        pass


class Agents:
    """Calls of agents with and without a session, through a gateway to servers that take no time."""

    def __init__(self, folder: str, url: str, num_agents: int) -> None:
        self.runner = asyncio.Runner()
        self.num_agents = num_agents
        self.stack = contextlib.AsyncExitStack()
        self.bench = self.runner.run(self._open(Path(folder), url))

    async def _open(self, folder: Path, url: str) -> Any:
        import agents
        from penstock.store.redis_client import connect
        from support.scripted_engines import make_tokenizer_folder, serving

        make_tokenizer_folder(folder)
        for name in ("key", "cluster-key"):
            (folder / name).write_text(agents.KEY)
        engines = {f"r{number}": agents.CachingEngine(token_s=0.0) for number in range(agents.NUM_SERVERS)}
        config, process = self.stack.enter_context(agents.gateway(folder, url, sticky=True))
        client = connect(config.redis)
        self.stack.push_async_callback(client.aclose)
        await self.stack.enter_async_context(serving(config, client, folder, engines, heartbeats=True))
        bench = agents.Bench(f"http://127.0.0.1:{config.gateway.port}", engines, process)
        self.stack.push_async_callback(bench.http.aclose)
        return bench

    def measure(self) -> Iterator[Rates]:
        meter = Meter("calls", {"the gateway": self.bench.gateway.pid})
        for name, with_session in (("without a session", False), ("with a session", True)):
            yield meter.measure(name, self.num_agents * 5, self.runner.run, self._talk(with_session))

    async def _talk(self, with_session: bool) -> None:
        await asyncio.gather(*(self.bench.talk(5, with_session=with_session) for _ in range(self.num_agents)))

    def close(self) -> None:
        self.runner.run(self.stack.aclose())
        self.runner.close()


class InstantEngine:
    """Answers every request at once with as many tokens as it may have, so that only the server's own work counts."""

    policy_version = 0

    def __init__(self) -> None:
        self.load = self._load = SimpleNamespace(num_generated_tokens=0, waiting_requests=0, kv_cache_usage=0.0)
        self._llm = SimpleNamespace(output_processor=SimpleNamespace(request_states={}))

    async def generate(self, request: Any) -> AsyncIterator[Any]:
        from penstock.trajectory import VersionSegment
        from penstock_rollout.engines.engine import TokenChunk

        count = request.sampling.max_tokens
        await asyncio.sleep(0)
        self.load.num_generated_tokens += count
        yield TokenChunk((2,) * count, (-0.5,) * count, (VersionSegment(0, count, 0),), "length")

    def stats(self) -> Any:
        from penstock_rollout.engines.engine import EngineStats

        return EngineStats(0, 0, 0.0)


class Rollout:
    """The loops of a rollout server: lease, agent, score, encode, append, with an engine that costs nothing."""

    def __init__(self, url: str, window_tokens: int) -> None:
        from replay import Clients, RedisReplayQueue  # type: ignore[attr-defined]
        from rollout_parts import paths

        model = Path("examples/arithmetic/model")
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        load = paths.Load(8, 32, 64, concurrency=64, groups_at_once=32, window_tokens=window_tokens)
        self.clients: Any = Clients(Address(url))
        queue = RedisReplayQueue(self.clients.producer, "rollout", paths.REPLAY)
        engine: Any = InstantEngine()
        self.paths = self.clients.run(self._open(paths.Paths, engine, queue, model, load, vocab_size))

    async def _open(self, kind: Any, *arguments: Any) -> Any:
        return await kind(*arguments).__aenter__()

    def measure(self) -> Iterator[Rates]:
        window = self.clients.run(self.paths.served())
        yield {"tokens/s": window.rate, "tokens per CPU second of the server": 1e6 / window.cpu_us}

    def close(self) -> None:
        self.clients.run(self.paths.__aexit__(None, None, None))
        self.clients.close()


PARTS: dict[str, Callable[..., Any]] = {
    "queue": Queue, "weights": Weights, "rollout": Rollout, "codec": Codec, "checkpoints": Checkpoints,
    "agents": Agents,
}  # fmt: skip


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is not an answer
    part, arguments = json.loads(sys.argv[1])
    measured = PARTS[part](**arguments)
    answers.write("ready\n")
    for _ in sys.stdin:
        rates: Rates = {}
        for some in measured.measure():
            rates |= some
        answers.write(json.dumps(rates) + "\n")
    measured.close()


if __name__ == "__main__":
    main()
