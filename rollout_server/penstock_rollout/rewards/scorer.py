"""Scores responses beside generation: in a thread, with a deadline, errors counted and never raised."""

from __future__ import annotations

import asyncio
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock.config.rollout import RewardConfig
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.function import exact_match, load_function, normalise_score

logger = logging.getLogger(__name__)


class Scorer:
    """One reward function for all responses of a server."""

    def __init__(self, config: RewardConfig, metrics: RolloutMetrics) -> None:
        self.config = config
        self.metrics = metrics
        self.function = (
            load_function(config.function_file, config.function_name) if config.function_file else exact_match
        )
        self._executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="reward")

    async def score(
        self, data_source: str, responses: list[str], ground_truth: Any, extra_info: dict[str, Any]
    ) -> list[tuple[float, dict[str, float]]]:
        """Reward and parts of each response of one prompt. A failure gives `error_value`."""
        loop = asyncio.get_running_loop()
        with self.metrics.reward_seconds.time():
            futures = [
                loop.run_in_executor(self._executor, self._score_one, data_source, response, ground_truth, extra_info)
                for response in responses
            ]
            return [await self._bounded(future, data_source) for future in futures]

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _score_one(
        self, data_source: str, response: str, ground_truth: Any, extra_info: dict[str, Any]
    ) -> tuple[float, dict[str, float]]:
        reward, parts = normalise_score(self.function(data_source, response, ground_truth, extra_info))
        if not math.isfinite(reward):
            raise ValueError(f"the reward function returned {reward}")
        return reward, parts

    async def _bounded(
        self, future: asyncio.Future[tuple[float, dict[str, float]]], data_source: str
    ) -> tuple[float, dict[str, float]]:
        try:
            return await asyncio.wait_for(future, self.config.timeout_s)
        except TimeoutError:
            logger.warning("a reward of %s took longer than %.0f s", data_source, self.config.timeout_s)
            self.metrics.reward_errors.labels("timeout").inc()
        except Exception as error:
            logger.warning("a reward of %s failed: %r", data_source, error)
            self.metrics.reward_errors.labels("exception").inc()
        return self.config.error_value, {}
