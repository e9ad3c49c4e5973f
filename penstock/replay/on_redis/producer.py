"""The calls of a rollout server, on Redis."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.replay.on_redis.script_calls import ScriptCalls
from penstock.replay.queue_types import (
    KEPT_EVALUATION_S,
    KEPT_EVALUATION_SHARE,
    SAVED_SHARE,
    AppendOutcome,
    FinishedGroup,
    Lease,
    Outbox,
    SavedTokens,
)
from penstock.store.redis_client import guarded
from penstock.store.scripts import read_columns, read_record


class RedisProducer(ScriptCalls):
    """GroupProducer of one run."""

    async def lease(self, server_id: str, max_prompts: int) -> list[Lease]:
        config = self.config
        leased = read_columns(await self.call(
            "lease", server_id, max_prompts, self._lease_ttl_ms, config.groups_per_step, config.max_staleness,
            config.capacity_bytes, config.max_attempts, int(config.settle_s * 1000),
            int(config.breaker.probe_s * 1000) if config.breaker.failures else 0,
        ))  # fmt: skip
        return [Lease(*row) for row in zip(leased["prompt_id"], leased["attempt"], leased["payload"], strict=True)]

    async def wait_for_prompts(self, timeout_s: float) -> None:
        await self.wait_for_entry(self.keys.lease_signals, timeout_s)

    async def heartbeat(self, server_id: str, leases: Sequence[Lease]) -> list[int]:
        if not leases:
            return []
        lost: list[int] = await self.call("heartbeat", server_id, self._lease_ttl_ms, *_pairs(leases))
        return lost

    async def append(self, lease: Lease, payload: bytes, min_version: int) -> AppendOutcome:
        return (await self.append_many([FinishedGroup(lease, payload, min_version)]))[0]

    async def append_many(self, groups: Sequence[FinishedGroup]) -> list[AppendOutcome]:
        return await self.payloads.append(groups, self.config)

    async def record_evaluation(
        self, evaluation_id: str, lease: Lease, rewards: Sequence[float], min_version: int, max_version: int,
        data_source: str = "", answers: Sequence[str] = (), kept_group: bytes = b"", accuracies: Sequence[float] = (),
    ) -> None:  # fmt: skip
        await self.call(
            "record_evaluation", evaluation_id, lease.prompt_id, len(rewards), sum(rewards), min_version, max_version,
            " ".join(map(repr, rewards)), json.dumps([data_source, list(answers), list(accuracies)]), kept_group,
            self.config.capacity_bytes // KEPT_EVALUATION_SHARE, KEPT_EVALUATION_S,
        )  # fmt: skip

    async def save_tokens(self, server_id: str, pieces: Sequence[tuple[Lease, SavedTokens]]) -> list[int]:
        if not pieces:
            return []
        flat: list[Any] = []
        for lease, piece in pieces:
            flat += (lease.prompt_id, lease.attempt, piece.sample, piece.start, piece.payload)
        max_bytes = self.config.capacity_bytes // SAVED_SHARE
        refused: list[int] = await self.call("save_tokens", server_id, max_bytes, *flat)
        return refused

    async def saved_tokens(self, lease: Lease) -> list[SavedTokens]:
        pieces = []
        for value in filter(None, await guarded(self.client.hvals(self.keys.saved(lease.prompt_id)))):
            sample, start, payload = value.split(b":", 2)
            pieces.append(SavedTokens(int(sample), int(start), payload))
        return sorted(pieces, key=lambda piece: (piece.sample, piece.start))

    async def forget_tokens(self, server_id: str, lease: Lease) -> None:
        await self.call("forget_tokens", server_id, lease.prompt_id, lease.attempt)

    async def give_back(
        self, server_id: str, lease: Lease, failure: str = "", *, is_final: bool = False, num_running: int = 0,
        forget_saved: bool = False,
    ) -> bool:  # fmt: skip
        max_attempts, breaker = 1 if is_final else self.config.max_attempts, self.config.breaker
        return bool(await self.call(
            "give_back", server_id, lease.prompt_id, lease.attempt, failure, max_attempts, int(is_final), num_running,
            breaker.failures, breaker.non_finite_failures, int(breaker.probe_s * 1000), int(forget_saved),
        ))  # fmt: skip

    async def reconcile(self, held: Sequence[Lease]) -> Outbox:
        if not held:
            return Outbox((), ())
        answer = read_record(await self.call("reconcile", *_pairs(held)))
        return Outbox(tuple(answer["done"]), tuple(answer["missing"]))

    @property
    def _lease_ttl_ms(self) -> int:
        return int(self.config.lease_ttl_s * 1000)


def _pairs(leases: Sequence[Lease]) -> list[int]:
    return [number for lease in leases for number in (lease.prompt_id, lease.attempt)]
