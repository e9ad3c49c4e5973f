"""The calls of the learner, on Redis."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from penstock.config.service import ReplayConfig
from penstock.errors import Conflict
from penstock.replay.on_redis.script_calls import ScriptCalls
from penstock.replay.queue_types import Committed, Delivery, GoneBack, KeptGroups
from penstock.store.redis_client import RedisClient, guarded

PROMPTS_AT_ONCE = 64
"""Prompts that one command reads. A prompt may be large, and Redis answers nobody else meanwhile."""


class RedisConsumer(ScriptCalls):
    """GroupConsumer of one run, without the calls that RedisIntake has too. `term` is 0 until `take_term` was
    called."""

    def __init__(self, client: RedisClient, run: str, config: ReplayConfig) -> None:
        super().__init__(client, run, config)
        self.term = 0
        self._attempts: dict[int, int] = {}
        """Attempts of the groups that were taken and not yet fetched. For any other group, Redis is asked."""
        self._fetched_ahead: dict[int, bytes] = {}
        """Payloads that came with the newest take, until they are fetched or dropped."""
        self._manifests: dict[int, list[int]] = {}
        """Ids in the open manifests, as far as this learner knows them."""

    async def store_id(self) -> str:
        name: bytes = await self.call("store_id", secrets.token_hex(8))
        return name.decode()

    async def take_term(self, at_least: int) -> int:
        self.term = await self.call("take_term", at_least)
        return self.term

    async def restore(self, step: int) -> dict[int, list[int]]:
        flat = await self.call("restore", self.term, step)
        manifests = {int(flat[i]): [int(word) for word in flat[i + 1].split()] for i in range(0, len(flat), 2)}
        self._manifests = {of_step: list(ids) for of_step, ids in manifests.items()}
        return manifests

    async def kept_groups(self, evaluation_id: str) -> KeptGroups:
        prompt_ids = await guarded(self.client.hkeys(self.keys.evaluation_groups(evaluation_id)))
        num_left_out = await guarded(self.client.hget(self.keys.evaluation(evaluation_id), "num_left_out"))
        return KeptGroups(tuple(sorted(map(int, prompt_ids))), int(num_left_out or 0))

    async def fetch_kept(self, evaluation_id: str, prompt_ids: Sequence[int]) -> list[bytes]:
        if not prompt_ids:
            return []
        groups = await guarded(self.client.hmget(self.keys.evaluation_groups(evaluation_id), list(prompt_ids)))
        return [group for group in groups if group is not None]

    async def forget_kept(self, evaluation_id: str) -> None:
        await guarded(self.client.unlink(self.keys.evaluation_groups(evaluation_id)))

    async def finish(self, step: int) -> None:
        await self.call("finish", self.term, step)

    async def take(self, step: int, max_groups: int) -> list[int]:
        known = self._manifests.setdefault(step, [])
        limits = (max_groups, self.config.take_order, self.config.capacity_bytes)
        taken, self._fetched_ahead = await self.payloads.take(self.term, step, *limits, *known)
        self._attempts |= taken
        known += taken
        return list(taken)

    async def wait_for_groups(self, timeout_s: float) -> None:
        """Every change that lets a group be taken adds an entry to the results: an append, a burial, a cancellation."""
        await self.wait_for_entry(self.keys.results, timeout_s)

    async def fetch(self, prompt_ids: Sequence[int]) -> list[Delivery]:
        known, ahead = self._attempts, self._fetched_ahead
        attempts = {prompt_id: known.pop(prompt_id) for prompt_id in prompt_ids if prompt_id in known}
        payloads = {prompt_id: ahead.pop(prompt_id) for prompt_id in attempts if prompt_id in ahead}
        if len(payloads) < len(attempts):
            others = {prompt_id: attempt for prompt_id, attempt in attempts.items() if prompt_id not in payloads}
            payloads |= await self.payloads.fetch(self.payloads.keys_of(others))
        # A learner before this one took these, or their attempt has changed.
        unknown = [prompt_id for prompt_id in prompt_ids if prompt_id not in payloads]
        if unknown:
            payloads |= await self.fetch_located(unknown)
        return [Delivery(prompt_id, payloads[prompt_id]) for prompt_id in prompt_ids if prompt_id in payloads]

    async def prompts(self, prompt_ids: Sequence[int]) -> list[bytes]:
        payloads: list[bytes] = []
        for first in range(0, len(prompt_ids), PROMPTS_AT_ONCE):
            some = prompt_ids[first : first + PROMPTS_AT_ONCE]
            payloads += [found or b"" for found in await guarded(self.client.hmget(self.keys.prompts, some))]
        return payloads

    async def commit(self, step: int, prompt_ids: Sequence[int], oldest_step: int = 0) -> int:
        committed: int = await self.call("commit", self.term, step, oldest_step, " ".join(map(str, prompt_ids)))
        if self._fetched_ahead:
            self._forget_fetched(prompt_ids)
        self._manifests = {of_step: ids for of_step, ids in self._manifests.items() if of_step > step}
        return committed

    async def committed(self) -> Committed:
        trained = await guarded(self.client.get(self.keys.trained))
        fields = ("committed_step", "kept_after", "gone_back_term", "gone_back_roll_backs", "gone_back_checkpoint")
        *numbers, checkpoint = await guarded(self.client.hmget(self.keys.counters, fields))
        step, kept_after, term, roll_backs = (int(number or 0) for number in numbers)
        gone_back = GoneBack(checkpoint.decode(), term, roll_backs) if checkpoint else None
        return Committed(step, (trained or b"").rstrip(b"\0"), kept_after, gone_back)

    async def go_back(self, checkpoint: str, step: int, prompt_ids: Sequence[int]) -> None:
        num_missing: int = await self.call("go_back", self.term, checkpoint, step, *prompt_ids)
        if num_missing:
            raise Conflict(f"{num_missing} prompts that were trained after step {step} are no longer kept")
        self._manifests, self._attempts, self._fetched_ahead = {}, {}, {}

    async def expire(self, prompt_id: int, reason: str = "stale") -> None:
        await self._drop("expire", prompt_id, reason)

    async def discard(self, prompt_id: int, reason: str) -> None:
        await self._drop("discard", prompt_id, reason)

    async def dead_letter(self, prompt_id: int, reason: str) -> None:
        await self._drop("dead_letter", prompt_id, reason)

    async def publish(self, policy_version: int, step: int, policy: bytes) -> None:
        await self.call("publish", self.term, policy_version, step, policy)

    async def allocate_version(self, at_least: int) -> int:
        version: int = await self.call("allocate_version", self.term, at_least)
        return version

    async def _drop(self, how: str, prompt_id: int, reason: str) -> None:
        """Remove a group, also from the manifests: the prompt may be taken again, and is then news to this learner."""
        self._forget_fetched([prompt_id])
        await self.call(how, self.term, prompt_id, reason)
        for ids in self._manifests.values():
            if prompt_id in ids:
                ids.remove(prompt_id)

    def _forget_fetched(self, prompt_ids: Sequence[int]) -> None:
        for prompt_id in prompt_ids:
            self._fetched_ahead.pop(prompt_id, None)
