"""The remote reward POSTs the four arguments of compute_score and reads a number or {"score": ...} from the reply."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import httpx

from penstock.config.rollout import RemoteReward
from penstock.errors import ConfigError
from penstock_rollout.rewards.function import SampleScore, read_score
from penstock_rollout.rewards.pool import Json, RewardFailed

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


class RemoteScorer:
    """Client of one reward service. It needs no reward process, because it only waits."""

    def __init__(self, reward: RemoteReward, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.reward = reward
        self._free = asyncio.Semaphore(reward.max_concurrent)
        self._http = httpx.AsyncClient(
            headers=bearer_headers(reward.api_key_file),
            timeout=reward.attempt_timeout_s,
            limits=httpx.Limits(max_connections=reward.max_concurrent),
            transport=transport,
            trust_env=False,
        )

    async def compute(self, arguments: Json, timeout_s: float) -> SampleScore:
        """Compute one reward. The deadline starts when a connection is free. A timeout names the last failure."""
        async with self._free:
            failures = ["no reply"]
            try:
                async with asyncio.timeout(timeout_s):
                    return _read(await post_until_answered(self._http, self.reward.url, arguments, failures.append))
            except TimeoutError as error:
                raise RewardFailed(
                    "timeout", f"{self.reward.url} gave no score within {timeout_s:g} s ({failures[-1]})"
                ) from error

    async def close(self) -> None:
        await self._http.aclose()


async def post_until_answered(
    http: httpx.AsyncClient, url: str, body: Json, note_failure: Callable[[str], None] = lambda failure: None
) -> httpx.Response:
    """POST until the service answers with a status other than 429 and 5xx. The caller sets a deadline.

    `note_failure` is called with the reason of each attempt that failed: the service may be starting, or the network
    may be down for a moment."""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            response = await http.post(url, json=body)
        except httpx.TransportError as error:
            note_failure(f"{type(error).__name__} {error}".strip())
        else:
            if response.status_code != httpx.codes.TOO_MANY_REQUESTS and not response.is_server_error:
                return response
            note_failure(f"status {response.status_code}")
        await asyncio.sleep(random.uniform(0.5, 1.0) * pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _read(response: httpx.Response) -> SampleScore:
    if not response.is_success:
        raise RewardFailed("exception", f"{response.url} answered {response.status_code}: {response.text[:200]!r}")
    try:
        return read_score(response.json())
    except ValueError as error:
        raise RewardFailed("exception", f"{response.url} answered {response.text[:200]!r}: {error}") from error


def bearer_headers(api_key_file: Path | None) -> dict[str, str]:
    """The headers that carry the key of a file, which is read again at every call."""
    if api_key_file is None:
        return {}
    try:
        return {"Authorization": f"Bearer {api_key_file.read_text().strip()}"}
    except OSError as error:
        raise ConfigError(
            f"api_key_file {api_key_file} cannot be read ({error.strerror}); check the path and its permissions"
        ) from error
