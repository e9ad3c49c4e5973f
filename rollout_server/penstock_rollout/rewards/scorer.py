"""Scores responses in separate processes, each with a deadline. Failures are counted and never raised."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from penstock.config.rewards import RemoteReward, Reward, RewardConfig, RewardModelReward
from penstock.errors import ConfigError
from penstock.store.notices import Event, PostEvent, ignore_event
from penstock_rollout.agents.episode import SampleScore
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.choice import RewardChoice
from penstock_rollout.rewards.pool import Json, RewardFailed, RewardPool
from penstock_rollout.rewards.remote import RemoteScorer

logger = logging.getLogger(__name__)


class Scorer:
    """Scores the responses of each data source with its reward. Call `check` first and `close` last."""

    def __init__(self, config: RewardConfig, metrics: RolloutMetrics, post: PostEvent = ignore_event) -> None:
        """`post` tells the run's users of failed rewards and of unknown data sources."""
        self.config = config
        self.metrics = metrics
        self.post = post
        self.choice = RewardChoice(config, post)
        self.num_scoring = 0
        """Prompts whose responses are being scored."""
        self._pool = RewardPool(config.num_processes)
        self._remotes: dict[RemoteReward, RemoteScorer] = {}

    async def check(self) -> None:
        """Raise ConfigError if a reward that the config names cannot work here."""
        for reward in self.choice.configured():
            if isinstance(reward, RemoteReward):
                self._remote(reward)
                continue
            if isinstance(reward, RewardModelReward):
                continue
            try:
                await self._pool.prepare(self.choice.settings_json(reward))
            except RewardFailed as error:
                message = str(error).removeprefix("ConfigError: ")
                raise ConfigError(f"rollout.reward: {message} (kind {reward.kind})") from error

    async def score(
        self, prompt: str, data_source: str, responses: list[str], ground_truth: Any, extra_info: dict[str, Any]
    ) -> list[SampleScore]:
        """Return the score of each response of one prompt. A failed reward is `error_value`.

        `prompt` says which prompt it is, for example `prompt 17`. The log line of a failed reward names it."""
        reward = self.choice.reward_for(data_source)
        shared = {"data_source": data_source, "ground_truth": ground_truth, "extra_info": extra_info}
        started = time.monotonic()
        self.num_scoring += 1
        try:
            scored = await asyncio.gather(
                *(
                    self._score_one(reward, {**shared, "solution_str": response}, f"sample {index} of {prompt}")
                    for index, response in enumerate(responses)
                )
            )
        finally:
            self.num_scoring -= 1
        self.metrics.reward_seconds.observe(time.monotonic() - started)
        return scored

    async def close(self) -> None:
        await self._pool.close()
        for remote in self._remotes.values():
            await remote.close()

    async def _score_one(self, reward: Reward, arguments: Json, sample: str) -> SampleScore:
        if isinstance(reward, RewardModelReward):
            return SampleScore(0.0, {})
        timeout_s = self.choice.timeout_s(reward)
        try:
            if isinstance(reward, RemoteReward):
                return SampleScore(*await self._remote(reward).compute(arguments, timeout_s))
            return SampleScore(*await self._pool.compute(self.choice.settings_json(reward), arguments, timeout_s))
        except RewardFailed as error:
            text = (
                f"the reward of {sample}, data source {arguments['data_source']!r}, failed ({error.kind}): {error}; "
                f"the sample gets error_value {self.config.error_value:g}"
            )
            logger.warning("%s", text)
            self.metrics.reward_errors.labels(error.kind).inc()
            self.post(Event("reward_failed", f"{reward.kind} {error.place}", text, error.traceback))
            return SampleScore(self.config.error_value, {}, failed=True)

    def _remote(self, reward: RemoteReward) -> RemoteScorer:
        if reward not in self._remotes:
            self._remotes[reward] = RemoteScorer(reward)
        return self._remotes[reward]
