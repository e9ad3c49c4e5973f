"""Measures sessions: the cost of a call, 2,000 open sessions on one gateway, and the hit rate of prefix caches.

    make bench-agents

The gateway and Redis are separate processes. This process plays the agents, and the rollout servers with engines
that answer after the time of a decode. Each engine remembers the blocks of tokens that it has computed, as the prefix
cache of a real engine does. The calls without a session are the same conversations without the header.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from harness import Bar, Measurement, gateway_process, make_parser, median_ratio, redis_process, report, sized, turns
from penstock.config.run import ModelConfig, RunConfig, WeightsConfig
from penstock.config.service import GatewayConfig, GatewayLimits, RedisConfig, SessionLimits
from penstock.machine import free_port
from penstock.store.redis_client import connect
from penstock.trajectory import VersionSegment
from penstock_rollout.engines.engine import GenerateRequest, TokenChunk
from support.scripted_engines import END, make_tokenizer_folder, serving, spelled

NUM_SERVERS = 4
NUM_TURNS = sized(5, 2)
NUM_SESSIONS = sized(2_000, 20)
NUM_WAVES = 3
IN_FLIGHT = 64
NUM_ROUNDS = sized(5, 1)
ROUND_SESSIONS = sized(8, 2)
BLOCK = 16
TOKEN_S = 0.005
"""Time of one decoded token, as of a fast engine."""
KEY = "a-key-for-the-benchmark"
ANSWER = (*spelled("abc ok " * 5)[:31], END)
QUESTION = "please look at the next file and say what is wrong with it"


@dataclass
class CachingEngine:
    """Answers with 32 tokens, and counts which part of each prompt it has computed before."""

    policy_version: int = 1
    name: str = "bench"
    token_s: float = TOKEN_S
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    blocks: set[int] = field(default_factory=set)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        ids = request.prompt_token_ids
        keys = [hash(ids[:end]) for end in range(BLOCK, len(ids) + 1, BLOCK)]
        self.num_prompt_tokens += len(ids)
        self.num_cached_tokens += BLOCK * len(list(itertools.takewhile(self.blocks.__contains__, keys)))
        everything = (*ids, *ANSWER)
        self.blocks.update(hash(everything[:end]) for end in range(BLOCK, len(everything) + 1, BLOCK))
        await asyncio.sleep(self.token_s * len(ANSWER))
        log_probs = (-0.5,) * len(ANSWER)
        yield TokenChunk(ANSWER, log_probs, (VersionSegment(0, len(ANSWER), self.policy_version),), "stop")


class Bench:
    """Agents that talk to one gateway."""

    def __init__(self, url: str, engines: dict[str, CachingEngine], gateway: psutil.Process) -> None:
        limits = httpx.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=IN_FLIGHT)
        headers = {"Authorization": f"Bearer {KEY}"}
        self.http = httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=120, trust_env=False)
        self.engines = engines
        self.gateway = gateway
        self._numbers = itertools.count()

    async def ask(self, history: list[Any], session_id: str) -> None:
        history.append({"role": "user", "content": QUESTION})
        headers = {"X-Penstock-Session": session_id} if session_id else {}
        answer = await self.http.post(
            "/v1/chat/completions", json={"model": "bench", "messages": history}, headers=headers
        )
        assert answer.status_code == 200, answer.text
        history.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})

    async def talk(self, num_turns: int, *, with_session: bool) -> None:
        name = f"s{next(self._numbers)}"
        history: list[Any] = [{"role": "system", "content": f"{name} you are an agent that repairs programs " * 4}]
        for _ in range(num_turns):
            await self.ask(history, name if with_session else "")

    async def rate(self, *, with_session: bool) -> float:
        """Calls per second of a few agents at once."""
        started = time.perf_counter()
        await asyncio.gather(*(self.talk(NUM_TURNS, with_session=with_session) for _ in range(ROUND_SESSIONS)))
        return ROUND_SESSIONS * NUM_TURNS / (time.perf_counter() - started)

    async def overhead(self) -> dict[str, Measurement]:
        measured = {name: Measurement(name, "calls/s") for name in ("without a session", "with a session")}
        for name, number in turns(measured, NUM_ROUNDS):
            rate = await self.rate(with_session=name == "with a session")
            if number:
                measured[name].rates.append(rate)
        return measured

    async def waves(self) -> list[tuple[float, float]]:
        """Open 2,000 sessions and make a call in each of them, again and again. Returns calls per second and the
        gateway's memory in MiB after each round of calls."""
        histories: dict[str, list[Any]] = {f"s{next(self._numbers)}": [] for _ in range(NUM_SESSIONS)}
        free, found = asyncio.Semaphore(IN_FLIGHT), []

        async def one(session_id: str) -> None:
            async with free:
                await self.ask(histories[session_id], session_id)

        for _ in range(NUM_WAVES):
            started = time.perf_counter()
            await asyncio.gather(*map(one, histories))
            rate = NUM_SESSIONS / (time.perf_counter() - started)
            found.append((rate, self.gateway.memory_info().rss / 2**20))
        return found

    async def hit_rate(self, num_sessions: int = sized(64, 4)) -> float:
        """Share of the prompt tokens of continued calls that the engines had cached."""
        free = asyncio.Semaphore(16)
        histories: list[list[Any]] = [
            [{"role": "system", "content": f"h{next(self._numbers)} " * 40}] for _ in range(num_sessions)
        ]
        names = [f"h{next(self._numbers)}" for _ in range(num_sessions)]

        async def one(number: int) -> None:
            async with free:
                await self.ask(histories[number], names[number])

        await asyncio.gather(*map(one, range(num_sessions)))
        before = self._counts()
        for _ in range(NUM_TURNS):
            await asyncio.gather(*map(one, range(num_sessions)))
        prompt, cached = (now - then for now, then in zip(self._counts(), before, strict=True))
        return cached / prompt

    def _counts(self) -> tuple[int, int]:
        engines = self.engines.values()
        return sum(engine.num_prompt_tokens for engine in engines), sum(engine.num_cached_tokens for engine in engines)


@contextmanager
def gateway(folder: Path, url: str, *, sticky: bool) -> Iterator[tuple[RunConfig, psutil.Process]]:
    limits = GatewayLimits(max_connections=4096, max_connections_per_address=4096)
    config = RunConfig(
        run="bench", run_dir=folder, model=ModelConfig(path=folder), redis=RedisConfig(url=url),
        weights=WeightsConfig(cluster_key_file=folder / "cluster-key"),
        gateway=GatewayConfig(
            port=free_port(), grpc_port=free_port(), api_key_file=folder / "key", limits=limits,
            sessions=SessionLimits(sticky=sticky, cache_bytes=8 * 2**20),
        ),
    )  # fmt: skip
    with gateway_process(config, folder / f"run-{config.gateway.port}.yaml") as pid:
        yield config, psutil.Process(pid)


async def measure(folder: Path, url: str) -> tuple[list[Measurement], list[Bar]]:
    engines = {f"r{number}": CachingEngine() for number in range(NUM_SERVERS)}
    with gateway(folder, url, sticky=True) as (config, process):
        client = connect(config.redis)
        async with serving(config, client, folder, engines, heartbeats=True):
            sticky = Bench(f"http://127.0.0.1:{config.gateway.port}", engines, process)
            calls = await sticky.overhead()
            hits = await sticky.hit_rate()
            for engine in engines.values():
                engine.token_s = 0.0
            bare = await sticky.overhead()
            waves = await sticky.waves()
            with gateway(folder, url, sticky=False) as (other, other_process):
                spread = Bench(f"http://127.0.0.1:{other.gateway.port}", engines, other_process)
                misses = await spread.hit_rate()
                await spread.http.aclose()
            await sticky.http.aclose()
        await client.aclose()
    memory = [mib for _, mib in waves]
    measurements = [
        *calls.values(),
        *(Measurement(f"{m.name}, an engine that takes no time", m.unit, m.rates) for m in bare.values()),
        Measurement("2,000 open sessions", "calls/s", [rate for rate, _ in waves]),
        Measurement("memory of the gateway after each call of 2,000 sessions", "MiB", memory),
        Measurement("prefix cache hit rate, sessions stay", "", [hits]),
        Measurement("prefix cache hit rate, sessions go anywhere", "", [misses]),
    ]
    slowdown = median_ratio(calls["without a session"], calls["with a session"])
    bars = [
        Bar("time of a call with a session / without", slowdown, 1.05, at_most=True),
        Bar("memory after the third call of 2,000 sessions / the first", memory[-1] / memory[0], 1.1, at_most=True),
        Bar("prefix cache hit rate on 4 servers", hits, 0.8),
        Bar("hit rate without sticky sessions / with", misses / hits, 0.6, at_most=True),
    ]
    return measurements, bars


def main() -> int:
    make_parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        make_tokenizer_folder(folder)
        (folder / "key").write_text(KEY)
        (folder / "cluster-key").write_text(KEY)
        with redis_process(folder) as (_, url):
            measurements, bars = asyncio.run(measure(folder, url))
    return 0 if report("agents", "sessions, 4 servers, one gateway", measurements, bars) else 1


if __name__ == "__main__":
    raise SystemExit(main())
