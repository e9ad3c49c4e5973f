"""The replay queue on Redis (6.2 or newer): every transition is one Lua script, so it happens whole or not at all.

Payloads of groups are plain strings, set in the same transaction as the script that files them, and fetched with MGET:
the large bytes never pass through Lua, nor through the event loop. All keys of a run share the hash tag `{run}`.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, cast

import redis
from redis.exceptions import NoScriptError

from penstock.config.service import ReplayConfig
from penstock.errors import NotFound
from penstock.replay.admission import admission
from penstock.replay.contract import (
    AppendOutcome,
    Delivery,
    Evaluation,
    FeedPosition,
    FinishedGroup,
    Lease,
    Outbox,
    PromptStatus,
    QueueStat,
    Submission,
)
from penstock.replay.scripts import call_script, load_script
from penstock.sample_scores import summarise
from penstock.store.redis_client import RedisClient, RedisClusterClient
from penstock.store.redis_errors import guarded

IDEMPOTENCY_TTL_S = 7 * 24 * 3600
APPENDED_BYTES = 2**20
FETCHED_GROUPS = 16
"""What goes in one exchange: Redis is slower with more, which its caches do not hold, and answers nobody meanwhile."""
_STAT_FIELDS = [field.name for field in dataclasses.fields(QueueStat) if not field.name.startswith("admission_")]
"""What stat.lua answers, in its order."""


def key_prefix(run: str) -> str:
    return f"penstock:{{{run}}}:"


class RedisReplayQueue:
    """PromptIntake, GroupProducer and GroupConsumer of one run. `term` is 0 until this object takes one."""

    def __init__(self, client: RedisClient, run: str, config: ReplayConfig) -> None:
        self.client = client
        self.prefix = key_prefix(run)
        self.config = config
        self.term = 0
        self._attempts: dict[int, int] = {}
        """Of the groups that were taken and not yet fetched; that of any other is asked for."""
        self._manifests: dict[int, list[int]] = {}
        """What this learner knows of the open ones."""

    # ── gateway ──

    async def submit(self, payloads: Sequence[bytes], priorities: Sequence[int], idempotency_key: str) -> Submission:
        return (await self.submit_many([(payloads, priorities, idempotency_key)]))[0]

    async def submit_many(self, requests: Sequence[tuple[Sequence[bytes], Sequence[int], str]]) -> list[Submission]:
        """As `submit` for the payloads, priorities and key of each in turn, in one exchange."""
        flat: list[Any] = []
        for payloads, priorities, idempotency_key in requests:
            flat += (idempotency_key, len(payloads))
            flat += [item for pair in zip(payloads, priorities, strict=True) for item in pair]
        answers = await self._call("submit", IDEMPOTENCY_TTL_S, *flat)
        return [
            Submission(tuple(range(first, first + count)), bool(replayed))
            for first, count, replayed in zip(answers[::3], answers[1::3], answers[2::3], strict=True)
        ]

    async def feed(
        self, name: str, fingerprint: str, position: int, payloads: Sequence[bytes], priorities: Sequence[int]
    ) -> FeedPosition:
        flat = [item for pair in zip(payloads, priorities, strict=True) for item in pair]
        stored, known = await self._call("feed", name, fingerprint, position, *flat)
        return FeedPosition(stored, known.decode())

    async def create_evaluation(self, evaluation_id: str, payloads: Sequence[bytes]) -> Evaluation:
        await self._call("create_evaluation", evaluation_id, *payloads)
        return await self.get_evaluation(evaluation_id)

    async def get_evaluation(self, evaluation_id: str) -> Evaluation:
        fields = await guarded(self.client.hgetall(f"{self.prefix}evaluation:{evaluation_id}"))
        if not fields:
            raise NotFound(f"evaluation {evaluation_id!r} does not exist")
        num_samples = int(fields[b"num_samples"])
        texts = [text for name, text in fields.items() if name.startswith(b"rewards:")]
        rewards = [[float(word) for word in text.split()] for text in texts]
        return Evaluation(
            evaluation_id=evaluation_id,
            num_prompts=int(fields[b"num_prompts"]),
            num_finished=int(fields[b"num_finished"]),
            score=float(fields[b"reward_sum"]) / num_samples if num_samples else 0.0,
            policy_version_min=int(fields.get(b"version_min", -1)),
            policy_version_max=int(fields.get(b"version_max", -1)),
            num_samples=num_samples,
            pass_at=summarise(rewards).pass_at,
        )

    async def get_prompt(self, prompt_id: int) -> PromptStatus:
        answer = await self._call("get_prompt", prompt_id)
        if not answer:
            raise NotFound(f"prompt {prompt_id} does not exist, or was discarded")
        return PromptStatus(prompt_id, answer[0].decode(), answer[1], answer[2])

    async def get_group(self, prompt_id: int) -> bytes:
        deliveries = await self.fetch([prompt_id])
        if not deliveries:
            raise NotFound(f"no group of prompt {prompt_id} is queued; it is not finished, or already trained")
        return deliveries[0].payload

    async def stat(self) -> QueueStat:
        numbers = dict(zip(_STAT_FIELDS, await self._call("stat"), strict=True))
        state = admission(
            step=numbers["step"], trained=numbers["trained"], queued=numbers["queued"], in_flight=numbers["in_flight"],
            max_staleness=self.config.max_staleness, groups_per_step=self.config.groups_per_step,
        )  # fmt: skip
        return QueueStat(**numbers, admission_limit=state.limit, admission_room=state.room)

    async def dead_letter_reasons(self) -> dict[str, int]:
        return await self._reasons("dead_reasons")

    async def expired_reasons(self) -> dict[str, int]:
        return await self._reasons("expired_reasons")

    async def evaluation_scores(self) -> dict[str, float]:
        scores = await guarded(self.client.hgetall(self.prefix + "scores"))
        return {benchmark.decode(): float(score) for benchmark, score in scores.items()}

    # ── rollout server ──

    async def lease(self, server_id: str, max_prompts: int) -> list[Lease]:
        config = self.config
        flat = await self._call(
            "lease", server_id, max_prompts, self._lease_ttl_ms, config.groups_per_step, config.max_staleness,
            config.capacity_bytes, config.max_attempts, int(config.settle_s * 1000),
        )  # fmt: skip
        return [Lease(*flat[i : i + 3]) for i in range(0, len(flat), 3)]

    async def heartbeat(self, server_id: str, leases: Sequence[Lease]) -> list[int]:
        if not leases:
            return []
        lost: list[int] = await self._call("heartbeat", server_id, self._lease_ttl_ms, *_pairs(leases))
        return lost

    async def append(self, lease: Lease, payload: bytes, min_version: int) -> AppendOutcome:
        return (await self.append_many([FinishedGroup(lease, payload, min_version)]))[0]

    async def append_many(self, groups: Sequence[FinishedGroup]) -> list[AppendOutcome]:
        parts = _parts(groups)
        if isinstance(self.client, RedisClusterClient):
            return await self.client.payloads.run(lambda client: _append_one_by_one(client, map(self._append, parts)))
        try:
            # Redis works on one transaction while the next is on its way, and need not hash the script again for that.
            return await self.client.payloads.run(
                lambda client: _append_at_once(
                    client, (self._append(part, by_digest=index > 0) for index, part in enumerate(parts))
                )
            )
        except NoScriptError:  # forgotten since the first: what was appended comes back as a duplicate
            return await self.client.payloads.run(lambda client: _append_at_once(client, map(self._append, parts)))

    def _append(self, groups: Sequence[FinishedGroup], *, by_digest: bool = False) -> list[tuple[Any, ...]]:
        """A transaction: the payloads, then the script that files them. By its digest only where Redis must know it:
        else the payloads could be set and not filed."""
        payloads: dict[str, bytes] = {}
        arguments: list[Any] = [self.config.capacity_bytes, self.config.take_order]
        for group in groups:
            prompt_id, attempt = group.lease.prompt_id, group.lease.attempt
            payloads[self._group_key(prompt_id, attempt)] = group.payload
            arguments += (prompt_id, attempt, len(group.payload), group.min_version)
        script = load_script("append")
        return [
            ("MSET", *(part for pair in payloads.items() for part in pair)),
            ("EVALSHA" if by_digest else "EVAL", script.sha if by_digest else script.text, 1, self.prefix, *arguments),
        ]

    async def record_evaluation(
        self, evaluation_id: str, lease: Lease, rewards: Sequence[float], min_version: int, max_version: int
    ) -> None:
        await self._call(
            "record_evaluation", evaluation_id, lease.prompt_id, len(rewards), sum(rewards), min_version, max_version,
            " ".join(map(repr, rewards)),
        )  # fmt: skip

    async def give_back(self, server_id: str, lease: Lease, failure: str = "", *, is_final: bool = False) -> None:
        max_attempts = 1 if is_final else self.config.max_attempts
        await self._call("give_back", server_id, lease.prompt_id, lease.attempt, failure, max_attempts)

    async def reconcile(self, held: Sequence[Lease]) -> Outbox:
        if not held:
            return Outbox((), ())
        settled, missing = await self._call("reconcile", *_pairs(held))
        return Outbox(tuple(settled), tuple(missing))

    # ── learner ──

    async def store_id(self) -> str:
        name: bytes = await self._call("store_id", secrets.token_hex(8))
        return name.decode()

    async def take_term(self, at_least: int) -> int:
        self.term = await self._call("take_term", at_least)
        return self.term

    async def restore(self, step: int) -> dict[int, list[int]]:
        flat = await self._call("restore", self.term, step)
        manifests = {int(flat[i]): [int(word) for word in flat[i + 1].split()] for i in range(0, len(flat), 2)}
        self._manifests = {of_step: list(ids) for of_step, ids in manifests.items()}
        return manifests

    async def feed_positions(self) -> dict[str, int]:
        fields = await guarded(self.client.hgetall(f"{self.prefix}feeds"))
        return {name.decode(): int(value) for name, value in fields.items() if b":" not in name}

    async def take(self, step: int, max_groups: int) -> list[int]:
        known = self._manifests.setdefault(step, [])
        flat: list[int] = await self._call("take", self.term, step, max_groups, self.config.take_order, *known)
        self._attempts.update(zip(flat[::2], flat[1::2], strict=True))
        known += flat[::2]
        return flat[::2]

    async def fetch(self, prompt_ids: Sequence[int]) -> list[Delivery]:
        keys = {
            prompt_id: self._group_key(prompt_id, self._attempts.pop(prompt_id))
            for prompt_id in prompt_ids
            if prompt_id in self._attempts
        }
        payloads = await self._payloads(keys)
        # Those taken by a learner before this one, or under an attempt that is no longer theirs.
        unknown = [prompt_id for prompt_id in prompt_ids if prompt_id not in payloads]
        if unknown:
            located = await self._call("locate", *unknown)
            keys = {prompt_id: key for prompt_id, key in zip(unknown, located, strict=True) if key}
            payloads |= await self._payloads(keys)
        return [Delivery(prompt_id, payloads[prompt_id]) for prompt_id in prompt_ids if prompt_id in payloads]

    async def _payloads(self, keys: dict[int, str]) -> dict[int, bytes]:
        """Those that are there, by prompt id."""
        if not keys:
            return {}
        names = list(keys.values())

        parts = [names[start : start + FETCHED_GROUPS] for start in range(0, len(names), FETCHED_GROUPS)]
        is_cluster = isinstance(self.client, RedisClusterClient)

        def exchange(client: redis.Redis) -> list[Any]:
            if is_cluster:
                return [payload for part in parts for payload in cast("list[Any]", client.mget(part))]
            # Redis writes one answer while the one before is being read.
            pipeline = client.pipeline(transaction=False)
            for part in parts:
                pipeline.mget(part)
            return [payload for answer in pipeline.execute() for payload in answer]

        found = await self.client.payloads.run(exchange)
        return {prompt_id: payload for prompt_id, payload in zip(keys, found, strict=True) if payload is not None}

    async def commit(self, step: int, prompt_ids: Sequence[int]) -> int:
        committed: int = await self._call("commit", self.term, step, *prompt_ids)
        self._manifests = {of_step: ids for of_step, ids in self._manifests.items() if of_step > step}
        return committed

    async def expire(self, prompt_id: int) -> None:
        await self._call("expire", self.term, prompt_id)

    async def discard(self, prompt_id: int, reason: str) -> None:
        await self._call("discard", self.term, prompt_id, reason)

    async def dead_letter(self, prompt_id: int, reason: str) -> None:
        await self._call("dead_letter", self.term, prompt_id, reason)

    async def publish(self, policy_version: int, step: int, policy: bytes) -> None:
        await self._call("publish", self.term, policy_version, step, policy)

    async def allocate_version(self, at_least: int) -> int:
        version: int = await self._call("allocate_version", self.term, at_least)
        return version

    # ── how ──

    @property
    def _lease_ttl_ms(self) -> int:
        return int(self.config.lease_ttl_s * 1000)

    def _group_key(self, prompt_id: int, attempt: int) -> str:
        return f"{self.prefix}group:{prompt_id}:{attempt}"

    async def _reasons(self, name: str) -> dict[str, int]:
        reasons = await guarded(self.client.hgetall(self.prefix + name))
        return {reason.decode(): int(count) for reason, count in reasons.items()}

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await call_script(self.client, self.prefix, name, *arguments)


def _parts(groups: Sequence[FinishedGroup]) -> list[list[FinishedGroup]]:
    """In order, each of about APPENDED_BYTES."""
    parts: list[list[FinishedGroup]] = []
    num_bytes = APPENDED_BYTES
    for group in groups:
        if num_bytes >= APPENDED_BYTES:
            parts.append([])
            num_bytes = 0
        parts[-1].append(group)
        num_bytes += len(group.payload)
    return parts


def _append_at_once(client: redis.Redis, transactions: Iterable[list[tuple[Any, ...]]]) -> list[AppendOutcome]:
    pipeline: Any = client.pipeline(transaction=False)
    for transaction in transactions:
        for command in (("MULTI",), *transaction, ("EXEC",)):
            pipeline.execute_command(*command)
    return [outcome for answer in pipeline.execute()[3::4] for outcome in _outcomes(answer)]


def _append_one_by_one(client: redis.Redis, transactions: Iterable[list[tuple[Any, ...]]]) -> list[AppendOutcome]:
    """By name: the methods are not offered in a transaction of a cluster."""
    outcomes: list[AppendOutcome] = []
    for transaction in transactions:
        pipeline: Any = client.pipeline(transaction=True)
        for command in transaction:
            pipeline.execute_command(*command)
        outcomes += _outcomes(pipeline.execute())
    return outcomes


def _outcomes(answer: list[Any]) -> list[AppendOutcome]:
    """Of the transaction's MSET and script."""
    for part in answer:
        if isinstance(part, Exception):
            raise part
    return [outcome.decode() for outcome in answer[1]]


def _pairs(leases: Sequence[Lease]) -> list[int]:
    return [number for lease in leases for number in (lease.prompt_id, lease.attempt)]
