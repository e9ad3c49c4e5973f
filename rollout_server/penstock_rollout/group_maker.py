"""From a leased prompt to a scored group."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np

from penstock.errors import PenstockError
from penstock.replay.contract import Lease
from penstock.trajectory import Group, Prompt, Trajectory
from penstock_rollout.agents.episode import Episode
from penstock_rollout.agents.registry import find_agent
from penstock_rollout.engines.engine import Engine
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.scorer import Scorer
from penstock_rollout.tokenization import Tokenization


class GroupMaker:
    """Generates all samples of a prompt at once, then scores them."""

    def __init__(
        self,
        run: str,
        server_id: str,
        engine: Engine,
        tokenization: Tokenization,
        scorer: Scorer,
        metrics: RolloutMetrics,
    ) -> None:
        self.run = run
        self.server_id = server_id
        self.engine = engine
        self.tokenization = tokenization
        self.scorer = scorer
        self.metrics = metrics

    async def make(self, lease: Lease, prompt: Prompt) -> Group:
        """Cancelling this aborts the samples that still run."""
        prompt_ids = self.tokenization.prompt_ids(prompt)
        agent = find_agent(prompt.agent_name)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(
                    agent(
                        self.engine,
                        f"{lease.prompt_id}.{lease.attempt}.{index}",
                        prompt_ids,
                        replace(prompt.sampling, seed=_seed(prompt, index)),
                    )
                )  # fmt: skip
                for index in range(prompt.num_samples)
            ]
        episodes = [task.result() for task in running]
        if any(episode.finish_reason == "aborted" or not len(episode.token_ids) for episode in episodes):
            raise PenstockError("a sample was aborted by the engine")
        responses = [self.tokenization.text(episode.token_ids.tolist()) for episode in episodes]
        scores = await self.scorer.score(prompt.data_source, responses, prompt.ground_truth, prompt.extra_info)
        trajectories = tuple(
            _trajectory(episode, reward, parts) for episode, (reward, parts) in zip(episodes, scores, strict=True)
        )
        self._observe(prompt, trajectories)
        return Group(
            run=self.run,
            prompt_id=lease.prompt_id,
            attempt=lease.attempt,
            server_id=self.server_id,
            data_source=prompt.data_source,
            sampling=prompt.sampling,
            prompt_token_ids=np.array(prompt_ids, dtype=np.int32),
            trajectories=trajectories,
            agent_name=prompt.agent_name,
            finished_at_ms=int(time.time() * 1000),
        )

    def _observe(self, prompt: Prompt, trajectories: tuple[Trajectory, ...]) -> None:
        self.metrics.trajectories.labels(prompt.data_source or "default").inc(len(trajectories))
        for trajectory in trajectories:
            self.metrics.response_tokens.observe(len(trajectory.token_ids))
            self.metrics.version_span.observe(trajectory.max_version - trajectory.min_version)
            self.metrics.truncated.inc(trajectory.finish_reason == "length")


def _seed(prompt: Prompt, index: int) -> int | None:
    return None if prompt.sampling.seed is None else prompt.sampling.seed + index


def _trajectory(episode: Episode, reward: float, parts: dict[str, float]) -> Trajectory:
    return Trajectory(
        token_ids=episode.token_ids,
        loss_mask=episode.loss_mask,
        log_probs=episode.log_probs,
        segments=episode.segments,
        reward=reward,
        reward_parts=parts,
        finish_reason=episode.finish_reason,
    )
