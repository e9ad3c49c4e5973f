"""The replay queue on Redis (6.2 or newer): every transition is one Lua script, so it happens whole or not at all.

Payloads of groups are plain strings, set in the same transaction as the script that files them, and fetched with GET:
the large bytes never pass through Lua. All keys of a run share the hash tag `{run}`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import redis.asyncio as redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import NoScriptError

from penstock.config.service import RedisConfig, ReplayConfig
from penstock.errors import ConfigError, NotFound
from penstock.redis_errors import guarded
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

IDEMPOTENCY_TTL_S = 7 * 24 * 3600
_STAT_FIELDS = [field.name for field in dataclasses.fields(QueueStat) if not field.name.startswith("admission_")]
"""What stat.lua answers, in its order."""


def connect(config: RedisConfig) -> redis.Redis:
    """A client with a deadline on every command. Does not connect yet.

    A cluster's client has the same commands, which it sends to the shard of the run's hash tag."""
    options: dict[str, Any] = {
        "socket_timeout": config.timeout_s,
        "socket_connect_timeout": config.timeout_s,
        "health_check_interval": 30,
    }
    if config.username:
        options["username"] = config.username
    if config.password_file is not None:
        options["password"] = _read_password(config.password_file)
    for name, path in (
        ("ssl_ca_certs", config.tls_ca_file), ("ssl_certfile", config.tls_cert_file),
        ("ssl_keyfile", config.tls_key_file),
    ):  # fmt: skip
        if path is not None:
            options[name] = str(path)
    if config.cluster:
        return cast("redis.Redis", RedisCluster.from_url(config.url, **options))
    return redis.Redis.from_url(config.url, **options)


def _read_password(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"redis.password_file: cannot read {path} ({error.strerror})") from error


def key_prefix(run: str) -> str:
    return f"penstock:{{{run}}}:"


class RedisReplayQueue:
    """PromptIntake, GroupProducer and GroupConsumer of one run. `term` is 0 until this object takes one."""

    def __init__(self, client: redis.Redis, run: str, config: ReplayConfig) -> None:
        self.client = client
        self.prefix = key_prefix(run)
        self.config = config
        self.term = 0

    # ── gateway ──

    async def submit(self, payloads: Sequence[bytes], priorities: Sequence[int], idempotency_key: str) -> Submission:
        flat = [item for pair in zip(payloads, priorities, strict=True) for item in pair]
        first, count, replayed = await self._call("submit", idempotency_key, IDEMPOTENCY_TTL_S, *flat)
        return Submission(tuple(range(first, first + count)), bool(replayed))

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
            raise NotFound(f"prompt {prompt_id} does not exist, or was dead-lettered or discarded")
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
        script = load_script("append")
        try:
            answers = await guarded(self._append_transaction(groups, script.sha))
        except NoScriptError:
            await guarded(self.client.script_load(script.text))
            answers = await guarded(self._append_transaction(groups, script.sha))
        return [answer.decode() for answer in answers]

    async def _append_transaction(self, groups: Sequence[FinishedGroup], sha: str) -> list[bytes]:
        payloads: dict[str, bytes] = {}
        arguments: list[Any] = [self.config.capacity_bytes, self.config.take_order]
        for group in groups:
            prompt_id, attempt = group.lease.prompt_id, group.lease.attempt
            payloads[f"{self.prefix}group:{prompt_id}:{attempt}"] = group.payload
            arguments += (prompt_id, attempt, len(group.payload), group.min_version)
        pipeline = self.client.pipeline(transaction=True)
        # By name: the methods are not offered in a transaction of a cluster.
        pipeline.execute_command("MSET", *(part for pair in payloads.items() for part in pair))
        pipeline.execute_command("EVALSHA", sha, 1, self.prefix, *arguments)
        answers: list[bytes] = (await pipeline.execute())[1]
        return answers

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

    async def take_term(self, at_least: int) -> int:
        self.term = await self._call("take_term", at_least)
        return self.term

    async def restore(self, step: int) -> dict[int, list[int]]:
        flat = await self._call("restore", self.term, step)
        return {int(flat[i]): [int(word) for word in flat[i + 1].split()] for i in range(0, len(flat), 2)}

    async def feed_positions(self) -> dict[str, int]:
        fields = await guarded(self.client.hgetall(f"{self.prefix}feeds"))
        return {name.decode(): int(value) for name, value in fields.items() if b":" not in name}

    async def take(self, step: int, max_groups: int) -> list[int]:
        taken: list[int] = await self._call("take", self.term, step, max_groups, self.config.take_order)
        return taken

    async def fetch(self, prompt_ids: Sequence[int]) -> list[Delivery]:
        if not prompt_ids:
            return []
        located = await self._call("locate", *prompt_ids)
        found = [(prompt_id, key) for prompt_id, key in zip(prompt_ids, located, strict=True) if key]
        if not found:
            return []
        payloads = await guarded(self.client.mget([key for _, key in found]))
        return [
            Delivery(prompt_id, payload)
            for (prompt_id, _), payload in zip(found, payloads, strict=True)
            if payload is not None
        ]

    async def commit(self, step: int, prompt_ids: Sequence[int]) -> int:
        committed: int = await self._call("commit", self.term, step, *prompt_ids)
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

    async def _reasons(self, name: str) -> dict[str, int]:
        reasons = await guarded(self.client.hgetall(self.prefix + name))
        return {reason.decode(): int(count) for reason, count in reasons.items()}

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await call_script(self.client, self.prefix, name, *arguments)


def _pairs(leases: Sequence[Lease]) -> list[int]:
    return [number for lease in leases for number in (lease.prompt_id, lease.attempt)]
