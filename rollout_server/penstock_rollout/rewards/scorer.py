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
NUM_THREADS = 2


class Scorer:
    """One reward function for all responses of a server."""

    def __init__(self, config: RewardConfig, metrics: RolloutMetrics) -> None:
        self.config = config
        self.metrics = metrics
        self.function = (
            load_function(config.function_file, config.function_name) if config.function_file else exact_match
        )
        self._executor = _threads()
        self._free = asyncio.Semaphore(NUM_THREADS)

    async def score(
        self, data_source: str, responses: list[str], ground_truth: Any, extra_info: dict[str, Any]
    ) -> list[tuple[float, dict[str, float]]]:
        """Reward and parts of each response of one prompt. A failure gives `error_value`."""
        with self.metrics.reward_seconds.time():
            return await asyncio.gather(
                *(self._bounded(data_source, response, ground_truth, extra_info) for response in responses)
            )

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _score_one(
        self, data_source: str, response: str, ground_truth: Any, extra_info: dict[str, Any]
    ) -> tuple[float, dict[str, float]]:
        reward, parts = normalise_score(self.function(data_source, response, ground_truth, extra_info))
        if not math.isfinite(reward):
            raise ValueError(f"the reward function returned {reward}")
        return reward, parts

    async def _bounded(self, data_source: str, *arguments: Any) -> tuple[float, dict[str, float]]:
        """One reward. Its deadline runs from when a thread takes it, not while it waits for one."""
        async with self._free:
            call = asyncio.get_running_loop().run_in_executor(self._executor, self._score_one, data_source, *arguments)
            try:
                async with asyncio.timeout(self.config.timeout_s):
                    return await call
            except TimeoutError:
                logger.warning("a reward of %s took longer than %.0f s", data_source, self.config.timeout_s)
                self.metrics.reward_errors.labels("timeout").inc()
                self._abandon_threads()
            except Exception as error:
                logger.warning("a reward of %s failed: %r", data_source, error)
                self.metrics.reward_errors.labels("exception").inc()
            return self.config.error_value, {}

    def _abandon_threads(self) -> None:
        """A thread cannot be killed: the hung one keeps its pool to itself, and the others get a new one."""
        self._executor.shutdown(wait=False)
        self._executor = _threads()


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=NUM_THREADS, thread_name_prefix="reward")
