"""A worker: leases tasks, lets an agent try each, and sends the reward of its session. Also its command line."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import contextvars
import inspect
import logging
import math
import os
import platform
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from penstock.api.records import LeasedTask
from penstock.cancellation import end_task, to_the_end
from penstock.client.client import PenstockClient
from penstock.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    PenstockError,
    QueueFull,
    RateLimited,
    Unavailable,
)

logger = logging.getLogger(__name__)
ASK_S = 10.0
"""How long the gateway holds a request for tasks, and so how long a worker without sessions needs to stop."""
PAUSE_S = 2.0
GIVE_BACK_S = 30.0
LONGEST_FAILURE = 500
BEATS_PER_LEASE = 3
MAX_LEASED = 1024
"""How many tasks the gateway leases in one request."""
PASSING = (DeadlineExceeded, RateLimited, Unavailable)
"""The gateway is restarted, overloaded or out of reach. The worker tries again."""
REFUSED = (Conflict, InvalidInput, NotFound)
"""A reward that will never be accepted: it is out of bounds, or the agent has made no call."""
REWARD_S = 900.0
"""How long a worker tries to send a reward to a gateway that is away."""

Reward = float | Mapping[str, float]
"""A reward, or its parts by name, of which `reward` is the reward itself."""


@dataclass(frozen=True)
class Attempt:
    """A try at a task: what the agent is to do, and the model to do it with.

    Every call to the model must carry `headers`, and is then part of the session that is trained."""

    task: LeasedTask
    url: str
    api_key: str
    model: str

    @property
    def payload(self) -> Any:
        """What was submitted with the task."""
        return self.task.payload

    @property
    def base_url(self) -> str:
        """For OpenAI's clients. Anthropic's take `url`."""
        return f"{self.url}/v1"

    @property
    def headers(self) -> dict[str, str]:
        return {"X-Penstock-Session": self.task.session_id}


Agent = Callable[[Attempt], Reward | Awaitable[Reward]]


@dataclass
class WorkDone:
    """What became of the leased sessions."""

    rewarded: int = 0
    failed: int = 0
    """The agent raised an error, or its reward was refused."""
    lost: int = 0
    """The lease went to another worker."""
    returned: int = 0
    """The worker was stopped before the agent had ended."""


async def work(
    client: PenstockClient, agent: Agent, *, at_once: int = 8, name: str = "", idle_s: float = float("inf"),
) -> WorkDone:  # fmt: skip
    """Let `agent` try tasks, `at_once` at a time, until there were none for `idle_s`, or until this is cancelled.

    - An agent that raises an error, makes no call, or whose reward is not finite costs its task a failure; the worker
      goes on.
    - Leases are renewed while agents work. An agent whose lease is lost is cancelled, and its session is not trained.
    - A gateway that is away for a while is asked again. Other refusals, such as a wrong key, are raised.
    - When the work is cancelled, places whose agents have not ended go to other workers at once.

    An agent is a coroutine function, or a function, which runs in a thread and cannot be cancelled: it is then left to
    end by itself, without effect."""
    worker = _Worker(client, agent, at_once, name or f"{platform.node()}-{os.getpid()}", (await client.get_run()).run)
    try:
        await worker.run(idle_s)
    finally:
        await to_the_end(worker.give_back(), GIVE_BACK_S)
    return worker.done


class _Worker:
    """The sessions at work, by id, and the loops that lease and renew."""

    def __init__(self, client: PenstockClient, agent: Agent, at_once: int, name: str, model: str) -> None:
        self.client = client
        self.agent = agent
        self.at_once = at_once
        self.name = name
        self.model = model
        self.done = WorkDone()
        self.running: dict[str, asyncio.Task[None]] = {}
        self.answered: set[str] = set()
        """Running sessions whose agent has ended. Their reward may have arrived, which ends their lease."""
        self.beat_s = ASK_S
        self.beats_faster = asyncio.Event()

    async def run(self, idle_s: float) -> None:
        beats = asyncio.create_task(self._renew())
        loop = asyncio.get_running_loop()
        idle_since: float | None = None  # when it asked for tasks in vain for the first time since agents were at work
        try:
            while self.running or idle_since is None or loop.time() - idle_since < idle_s:
                if beats.done():
                    beats.result()
                asked_at = loop.time()
                room = min(self.at_once - len(self.running), MAX_LEASED)
                leased = await self._lease(room, min(ASK_S, idle_s)) if room else []
                for task in leased:
                    if task.lease_s / BEATS_PER_LEASE < self.beat_s:
                        self.beat_s = task.lease_s / BEATS_PER_LEASE
                        self.beats_faster.set()
                    self.running[task.session_id] = asyncio.create_task(self._attempt(task))
                if self.running:
                    idle_since = None
                    if not leased:
                        await asyncio.wait(self.running.values(), timeout=PAUSE_S, return_when=asyncio.FIRST_COMPLETED)
                elif idle_since is None:
                    idle_since = asked_at
                self._forget_ended()
        finally:
            await end_task(beats)

    async def give_back(self) -> None:
        """Return the places of agents that have not ended."""
        for session_id, task in self.running.items():
            await end_task(task)
            if task.cancelled():
                self.done.returned += 1
                try:
                    await self.client.return_task(session_id)
                except PenstockError as error:
                    logger.warning("session %s is not returned (%s); its lease ends by itself", session_id, error)
        self.running.clear()

    async def _lease(self, room: int, wait_s: float) -> list[LeasedTask]:
        try:
            return await self.client.lease_tasks(self.name, room, 0.0 if self.running else wait_s)
        except PASSING as error:
            logger.warning("no tasks: %s; asking again in %g s", error, PAUSE_S)
            await asyncio.sleep(PAUSE_S)
            return []

    async def _attempt(self, task: LeasedTask) -> None:
        """Run the agent and send its reward, or its failure."""
        attempt = Attempt(task, self.client.address.url, self.client.address.api_key, self.model)
        try:
            reward, parts = _split(await self._run_agent(attempt))
            self.answered.add(task.session_id)
            await self._send_reward(task.session_id, reward, parts)
        except Exception as error:
            if task.session_id in self.answered and not isinstance(error, REFUSED):
                raise
            self.answered.add(task.session_id)
            self.done.failed += 1
            text = f"{type(error).__name__}: {error}"[:LONGEST_FAILURE]
            logger.warning("the agent failed at session %s: %s", task.session_id, text, exc_info=error)
            await self.client.return_task(task.session_id, text)
        else:
            self.done.rewarded += 1

    async def _send_reward(self, session_id: str, reward: float, parts: Mapping[str, float]) -> None:
        """Send the reward, again and again while the gateway is away: all the agent's work depends on it."""
        deadline = time.monotonic() + REWARD_S
        while True:
            try:
                await self.client.reward_session(session_id, reward, parts)
                return
            except QueueFull as error:
                logger.info("session %s has its reward; %s", session_id, error)
                return
            except PASSING as error:
                if time.monotonic() > deadline:
                    raise
                logger.warning("the reward of session %s is not sent: %s; trying again", session_id, error)
                await asyncio.sleep(PAUSE_S)

    async def _run_agent(self, attempt: Attempt) -> Reward:
        if inspect.iscoroutinefunction(self.agent) or inspect.iscoroutinefunction(type(self.agent).__call__):
            result = self.agent(attempt)
        else:
            result = await _in_thread(self.agent, attempt)
        return await result if inspect.isawaitable(result) else result

    async def _renew(self) -> None:
        """Renew the leases of all running sessions; cancel the agents of lost sessions."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.beat_s):
                    await self.beats_faster.wait()
            self.beats_faster.clear()
            sessions = [session_id for session_id in self.running if session_id not in self.answered]
            if not sessions:
                continue
            try:
                lost = await self.client.heartbeat_tasks(sessions)
            except PASSING as error:
                logger.warning("leases are not renewed: %s; trying again", error)
                continue
            for session_id in set(lost) - self.answered:
                if (task := self.running.pop(session_id, None)) is not None:
                    self.done.lost += 1
                    logger.warning("the lease of session %s is lost; its agent is stopped", session_id)
                    await end_task(task)

    def _forget_ended(self) -> None:
        for session_id, task in list(self.running.items()):
            if task.done():
                del self.running[session_id]
                self.answered.discard(session_id)
                if (error := task.exception()) is not None:
                    logger.warning("session %s: %s", session_id, error)


async def _in_thread(agent: Agent, attempt: Attempt) -> Any:
    """Run an agent in its own thread. A pool has fewer threads than agents that should run at once, and the end of
    the process would wait for agents that go on after they were cancelled."""
    ended: Future[Any] = Future()
    context = contextvars.copy_context()
    ended.set_running_or_notify_cancel()

    def run() -> None:
        try:
            ended.set_result(context.run(agent, attempt))
        except Exception as error:
            ended.set_exception(error)
        except BaseException as error:
            ended.set_exception(RuntimeError(f"the agent ended with {error!r}"))

    threading.Thread(target=run, name=attempt.task.session_id, daemon=True).start()
    return await asyncio.wrap_future(ended)


def _split(reward: Reward) -> tuple[float, dict[str, float]]:
    if not isinstance(reward, Mapping):
        return _finite("its reward", reward), {}
    parts = {name: _finite(name, value) for name, value in reward.items()}
    if "reward" not in parts:
        names = ", ".join(parts) or "none"
        raise ValueError(f"an agent that returns parts must return `reward` too; it returned {names}")
    return parts.pop("reward"), parts


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {value}")
    return float(value)


def worker_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    gateway = parser.add_mutually_exclusive_group(required=True)
    gateway.add_argument("--run-dir", help="folder of a run on this machine")
    gateway.add_argument("--url", help="a gateway; its key is read from PENSTOCK_API_KEY")
    parser.add_argument("--submit", type=int, default=0, help="submit the tasks first, with this many sessions each")
    parser.add_argument("--at-once", type=int, default=8, help="sessions at a time (8)")
    parser.add_argument("--idle-s", type=float, default=float("inf"), help="end after this long without a task")
    return parser


async def run_worker(options: argparse.Namespace, agent: Agent, payloads: Sequence[Any]) -> None:
    """Let the agent work as the options of `worker_parser` say, and print what became of its sessions. `payloads` are
    the tasks that `--submit` submits."""
    connect = PenstockClient.from_run_dir if options.run_dir else PenstockClient
    async with connect(options.run_dir or options.url, api_key=os.environ.get("PENSTOCK_API_KEY", "")) as client:
        if options.submit:
            await client.submit_tasks(payloads, num_sessions=options.submit)
        done = await work(client, agent, at_once=options.at_once, idle_s=options.idle_s)
        print(f"{done.rewarded} sessions rewarded, {done.failed} failed, {done.lost} lost")
