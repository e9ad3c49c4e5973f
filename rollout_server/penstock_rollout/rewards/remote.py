"""The remote reward POSTs the four arguments of compute_score and reads a number or {"score": ...} from the reply."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx

from penstock.config.rewards import RemoteReward
from penstock.errors import ConfigError
from penstock_rollout.rewards.function import normalise_score, predicted_answer
from penstock_rollout.rewards.placed_scores import read_placed
from penstock_rollout.rewards.pool import Json, RewardFailed
from penstock_rollout.rewards.sample_score import SampleScore

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


class RemoteScorer:
    """Client of one reward service. It needs no reward process, because it only waits."""

    def __init__(self, reward: RemoteReward, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.reward = reward
        self._free = asyncio.Semaphore(reward.max_concurrent)
        self._http = httpx.AsyncClient(
            headers=_headers(reward.api_key_file),
            timeout=reward.attempt_timeout_s,
            limits=httpx.Limits(max_connections=reward.max_concurrent),
            transport=transport,
            trust_env=False,
        )

    async def compute(self, arguments: Json, timeout_s: float) -> SampleScore:
        """Compute one reward. The deadline starts when a connection is free. A timeout names the last failure."""
        async with self._free:
            failure = "no reply"
            pause_s = FIRST_PAUSE_S
            try:
                async with asyncio.timeout(timeout_s):
                    while True:
                        try:
                            response = await self._http.post(self.reward.url, json=arguments)
                        except httpx.TransportError as error:
                            failure = f"{type(error).__name__} {error}".strip()
                        else:
                            if not _is_transient(response):
                                return _read(response)
                            failure = f"status {response.status_code}"
                        await asyncio.sleep(random.uniform(0.5, 1.0) * pause_s)
                        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            except TimeoutError as error:
                raise RewardFailed(
                    "timeout", f"{self.reward.url} gave no score within {timeout_s:g} s ({failure})"
                ) from error

    async def close(self) -> None:
        await self._http.aclose()


def _is_transient(response: httpx.Response) -> bool:
    return response.status_code == httpx.codes.TOO_MANY_REQUESTS or response.is_server_error


def _read(response: httpx.Response) -> SampleScore:
    if not response.is_success:
        raise RewardFailed("exception", f"{response.url} answered {response.status_code}: {response.text[:200]!r}")
    try:
        result = response.json()
        return SampleScore(*normalise_score(result), answer=predicted_answer(result), placed=tuple(read_placed(result)))
    except ValueError as error:
        raise RewardFailed("exception", f"{response.url} answered {response.text[:200]!r}: {error}") from error


def _headers(api_key_file: Path | None) -> dict[str, str]:
    if api_key_file is None:
        return {}
    try:
        return {"Authorization": f"Bearer {api_key_file.read_text().strip()}"}
    except OSError as error:
        raise ConfigError(
            f"api_key_file {api_key_file} cannot be read ({error.strerror}); check the path and its permissions"
        ) from error
