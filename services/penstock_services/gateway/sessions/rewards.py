"""Turns rewarded sessions into groups in the replay queue, each once.

A reward closes the session, so its calls no longer change. Its groups get prompt ids that depend on its name and its
first call alone, and the queue takes the first group of a prompt and no other. So this can be repeated at any point, by
any gateway: after a crash, a lost answer, or when the queue was full.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping

from redis.exceptions import RedisError

from penstock.codec import encode_prompt
from penstock.config.run import RunConfig
from penstock.errors import PenstockError, QueueFull
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import OfferedGroup, Origin
from penstock.sessions.session_store import Closing, Reward, SessionStore
from penstock.sessions.task_store import TaskStore
from penstock.store.ownership import Owner
from penstock.trajectory import SESSION_AGENT, Group, Prompt
from penstock.v1 import tasks_pb2
from penstock_services.gateway.sessions.trajectories import RewardedTree, SharedPrompt, shared_prompts
from penstock_services.gateway.sessions.tree import SessionTree

logger = logging.getLogger(__name__)
DATA_SOURCE = "session"
ORIGIN = "session"
"""Takes the place of a rollout server: it holds the leases of the groups, and they name it as their server."""
SWEEP_S = 1.0
"""Time between two sweeps."""


class SessionRewards:
    """The way of one run's sessions into its queue."""

    def __init__(self, config: RunConfig, queue: RedisReplayQueue, store: SessionStore, tasks: TaskStore) -> None:
        self.config = config
        self.queue = queue
        self.store = store
        self.tasks = tasks

    async def give(
        self, session_id: str, reward: float, parts: Mapping[str, float], task_id: str, owner: Owner
    ) -> tuple[Closing, tuple[int, ...]]:
        """Give a session its reward. Returns what became of it, and the prompt ids of its groups. A session that has
        joined a task has none until the task is complete."""
        closing = await self.store.close(session_id, Reward(reward, dict(parts)), task_id, owner)
        if closing.state == "closed" and closing.reward is not None:
            return closing, await self._finish(f"session:{session_id}", {session_id: closing.reward}, DATA_SOURCE)
        if closing.state == "complete":
            return closing, await self.finish(f"task:{closing.task_id}")
        return closing, closing.prompt_ids

    async def finish(self, name: str) -> tuple[int, ...]:
        """Make a group of a closed session or a complete task (session:ID or task:ID), and append it."""
        kind, _, identity = name.partition(":")
        if kind == "session":
            found, data_source = [identity], DATA_SOURCE
        else:
            task = await self.tasks.get(identity)
            if task.state == tasks_pb2.Task.FINISHED:
                return tuple(task.prompt_ids)
            found, data_source = list(task.session_ids), task.data_source or DATA_SOURCE
        rewards = {session_id: await self.store.reward(session_id) for session_id in found}
        known = {session_id: reward for session_id, reward in rewards.items() if reward is not None}
        return await self._finish(name, known, data_source)

    async def sweep(self, stopping: asyncio.Event) -> None:
        """Finish what dead workers and dead gateways have left, about once a second, until the gateway stops.

        Each step is atomic or can be repeated, so it does not matter how many gateways do this. Errors of Redis are
        logged, and the next sweep tries again."""
        while not stopping.is_set():
            try:
                async with asyncio.timeout(4 * self.config.redis.timeout_s):
                    await self.sweep_once()
            except (PenstockError, RedisError, TimeoutError) as error:
                logger.warning("sessions and tasks of run %s were not swept: %s", self.config.run, error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_S):
                    await stopping.wait()

    async def sweep_once(self) -> None:
        """Return the places of dead workers, complete overdue tasks, and append groups that are due."""
        num_reclaimed, num_due = await self.tasks.sweep()
        if num_reclaimed or num_due:
            logger.info("returned %d places of lost workers, completed %d overdue tasks", num_reclaimed, num_due)
        for name in await self.store.due():
            try:
                await self.finish(name)
            except PenstockError as error:
                logger.warning("%s is not yet in the queue: %s", name, error)

    async def _finish(self, name: str, rewards: Mapping[str, Reward], data_source: str) -> tuple[int, ...]:
        sessions: list[RewardedTree] = []
        for session_id, reward in rewards.items():
            tree = SessionTree()
            tree.add(await self.store.calls(session_id))
            if not tree.calls and (answer := await self.store.answer(session_id)) is not None:
                return answer  # Another gateway was faster.
            sessions.append(RewardedTree(tree, reward.reward, reward.parts))
        prompts = await asyncio.to_thread(shared_prompts, sessions)
        owner = await self.store.owner(next(iter(rewards), ""))
        groups = [self._offered(number, prompt, data_source, owner) for number, prompt in enumerate(prompts)]
        # A name that is used again, after its session was forgotten, has another first call, so its own prompt ids.
        first = next((call.call_id for session in sessions for call in session.tree.calls), "")
        accepted = await self.queue.accept(groups, Origin(ORIGIN, f"{name}:{first}")) if groups else []
        if any(outcome == "full" for _, outcome in accepted):
            raise QueueFull("the queue has no room for the session; it is added later, or send the reward again")
        return await self.store.finish(name, list(rewards), tuple(prompt_id for prompt_id, _ in accepted))

    def _offered(self, number: int, shared: SharedPrompt, data_source: str, owner: str) -> OfferedGroup:
        prompt = Prompt(
            token_ids=tuple(shared.prompt_token_ids.tolist()), sampling=shared.sampling, data_source=data_source,
            num_samples=len(shared.trajectories), agent_name=SESSION_AGENT, owner=owner,
        )  # fmt: skip
        group = Group(
            run=self.config.run, prompt_id=0, attempt=0, server_id=ORIGIN, data_source=data_source,
            sampling=shared.sampling, prompt_token_ids=shared.prompt_token_ids, trajectories=shared.trajectories,
            agent_name=SESSION_AGENT, finished_at_ms=int(time.time() * 1000),
        )  # fmt: skip
        return OfferedGroup(number, encode_prompt(prompt), prompt.priority, group)
