"""The learner's own log-probs of the tokens that it trains, to compare with the engine's.

They are kept for KEPT_GROUPS groups of each step, for KEPT_S seconds: for people to look at, not as a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import redis.asyncio as redis
from numpy.typing import NDArray

from penstock.store.keys import RunKeys
from penstock.store.redis_client import guarded
from penstock.trajectory import Group

KEPT_GROUPS = 4
KEPT_S = 900


class RecomputedLogProbs:
    """Log-probs of one run's groups, by prompt and attempt. The learner writes them and the gateway reads them."""

    def __init__(self, client: redis.Redis, run: str) -> None:
        self.client: Any = client
        self.keys = RunKeys(run)

    async def keep(self, groups: Sequence[Group], log_probs: NDArray[np.float32]) -> None:
        """Keep the log-probs of the first groups. `log_probs` has one for every response token of all groups, in
        order."""
        start = 0
        for group in groups[:KEPT_GROUPS]:
            part = log_probs[start : start + group.num_response_tokens].astype("<f4").tobytes()
            start += group.num_response_tokens
            await guarded(self.client.set(self._key(group), part, ex=KEPT_S))

    async def get(self, group: Group) -> list[NDArray[np.float32]]:
        """One array per trajectory; an empty list if the group's log-probs were not kept or not recomputed."""
        data = await guarded(self.client.get(self._key(group)))
        if data is None or len(data) != 4 * group.num_response_tokens:
            return []
        ends = np.cumsum([len(trajectory.token_ids) for trajectory in group.trajectories])[:-1]
        return [part.astype(np.float32) for part in np.split(np.frombuffer(data, dtype="<f4"), ends)]

    def _key(self, group: Group) -> str:
        return self.keys.recomputed(group.prompt_id, group.attempt)
