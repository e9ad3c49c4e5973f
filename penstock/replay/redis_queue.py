"""The replay queue on Redis (6.2 or newer). Every transition is one Lua script, so it happens whole or not at all.

The scripts are in `lua/`. penstock.replay.group_payloads moves the groups' bytes.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.config.service import ReplayConfig
from penstock.errors import Conflict, NotFound
from penstock.replay.admission import admission
from penstock.replay.evaluations import KEPT_EVALUATION_S, KEPT_EVALUATION_SHARE, Evaluation, KeptGroups
from penstock.replay.group_payloads import GroupPayloads
from penstock.replay.queue_types import (
    SAVED_SHARE,
    AppendOutcome,
    Committed,
    Delivery,
    FeedPosition,
    FinishedGroup,
    GoneBack,
    Lease,
    Outbox,
    PromptStatus,
    QueueStat,
    SavedTokens,
    Submission,
)
from penstock.sample_scores import PromptSamples, scores_by_source, summarise
from penstock.store.keys import RunKeys
from penstock.store.redis_client import RedisClient
from penstock.store.redis_errors import guarded
from penstock.store.scripts import QUEUE, read_columns, read_record, read_rows

IDEMPOTENCY_TTL_S = 7 * 24 * 3600
PROMPTS_AT_ONCE = 64
"""Prompts that one command reads. A prompt may be large, and Redis answers nobody else meanwhile."""


class RedisReplayQueue:
    """PromptIntake, GroupProducer and GroupConsumer of one run. `term` is 0 until `take_term` was called."""

    def __init__(self, client: RedisClient, run: str, config: ReplayConfig) -> None:
        self.client = client
        self.keys = RunKeys(run)
        self.config = config
        self.term = 0
        self.payloads = GroupPayloads(client, self.keys)
        self._attempts: dict[int, int] = {}
        """Attempts of the groups that were taken and not yet fetched. For any other group, Redis is asked."""
        self._fetched_ahead: dict[int, bytes] = {}
        """Payloads that came with the newest take, until they are fetched or dropped."""
        self._manifests: dict[int, list[int]] = {}
        """Ids in the open manifests, as far as this learner knows them."""
        self._seen: dict[str, bytes] = {}
        """Newest entry of each stream that a wait has seen. The next wait returns at once if there are newer ones, so
        no signal between two waits is missed."""

    # ── gateway ──

    async def submit(self, payloads: Sequence[bytes], priorities: Sequence[int], idempotency_key: str) -> Submission:
        return (await self.submit_many([(payloads, priorities, idempotency_key)]))[0]

    async def submit_many(
        self, requests: Sequence[tuple[Sequence[bytes], Sequence[int], str]], *, all_or_none: bool = False
    ) -> list[Submission]:
        """`submit` for many requests in one exchange. A request is its payloads, priorities and idempotency key.

        With `all_or_none`, nothing is submitted if a key was used for another number of prompts. The answers then have
        the ids of the keys that were used before."""
        flat: list[Any] = []
        for payloads, priorities, idempotency_key in requests:
            flat += (idempotency_key, len(payloads))
            flat += [item for pair in zip(payloads, priorities, strict=True) for item in pair]
        return [
            Submission(tuple(range(row["first_id"], row["first_id"] + row["count"])), bool(row["replayed"]))
            for row in read_rows(await self._call("submit", IDEMPOTENCY_TTL_S, int(all_or_none), *flat))
        ]

    async def feed(
        self, name: str, fingerprint: str, position: int, payloads: Sequence[bytes], priorities: Sequence[int],
        epoch_prompts: int = 0,
    ) -> FeedPosition:  # fmt: skip
        flat = [item for pair in zip(payloads, priorities, strict=True) for item in pair]
        feed = read_record(await self._call("feed", name, fingerprint, position, epoch_prompts, *flat))
        return FeedPosition(feed["position"], feed["fingerprint"].decode(), feed["epoch_prompts"], feed["last_id"])

    async def create_evaluation(self, evaluation_id: str, payloads: Sequence[bytes]) -> Evaluation:
        await self._call("create_evaluation", evaluation_id, *payloads)
        return await self.get_evaluation(evaluation_id)

    async def get_evaluation(self, evaluation_id: str) -> Evaluation:
        fields = await guarded(self.client.hgetall(self.keys.evaluation(evaluation_id)))
        if not fields:
            raise NotFound(f"evaluation {evaluation_id!r} does not exist")
        num_samples = int(fields[b"num_samples"])
        rewards = {
            name.partition(b":")[2]: [float(word) for word in text.split()]
            for name, text in fields.items()
            if name.startswith(b"rewards:")
        }
        samples = []
        for prompt, scored in rewards.items():
            source, answers, *others = json.loads(fields.get(b"samples:" + prompt, b'["", []]'))
            samples.append(PromptSamples(source, tuple(scored), tuple(answers), *map(tuple, others)))
        return Evaluation(
            evaluation_id=evaluation_id,
            num_prompts=int(fields[b"num_prompts"]),
            num_finished=int(fields[b"num_finished"]),
            score=float(fields[b"reward_sum"]) / num_samples if num_samples else 0.0,
            policy_version_min=int(fields.get(b"version_min", -1)),
            policy_version_max=int(fields.get(b"version_max", -1)),
            num_samples=num_samples,
            pass_at=summarise(list(rewards.values())).pass_at,
            num_failed=int(fields.get(b"num_failed", 0)),
            by_source=scores_by_source(samples),
        )

    async def record_scores(self, number: int, scores: Mapping[str, float]) -> None:
        flat = [item for name, value in scores.items() for item in (name, repr(value))]
        await self._call("record_scores", number, *flat)

    async def get_prompt(self, prompt_id: int) -> PromptStatus:
        found = read_record(await self._call("get_prompt", prompt_id))
        if not found:
            raise NotFound(f"prompt {prompt_id} does not exist, or was discarded")
        return PromptStatus(prompt_id, found["state"].decode(), found["attempt"], found["payload"])

    async def get_group(self, prompt_id: int) -> bytes:
        deliveries = await self.fetch([prompt_id])
        if not deliveries:
            raise NotFound(f"no group of prompt {prompt_id} is queued; it is not finished, or already trained")
        return deliveries[0].payload

    async def waiting(self) -> set[int]:
        """The prompts whose groups wait for the learner."""
        return {int(prompt_id) for prompt_id in await guarded(self.client.zrange(self.keys.ready, 0, -1))}

    async def taken(self) -> set[int]:
        """The prompts whose groups the learner has taken and not committed."""
        return {int(prompt_id) for prompt_id in await guarded(self.client.smembers(self.keys.delivered))}

    async def stat(self) -> QueueStat:
        numbers = read_record(await self._call("stat"))
        state = admission(
            step=numbers["step"], trained=numbers["trained"], queued=numbers["queued"], in_flight=numbers["in_flight"],
            max_staleness=self.config.max_staleness, groups_per_step=self.config.groups_per_step,
        )  # fmt: skip
        return QueueStat(**numbers, admission_limit=state.limit, admission_room=state.room)

    async def dead_letter_reasons(self) -> dict[str, int]:
        return await self._reasons(self.keys.dead_reasons)

    async def expired_reasons(self) -> dict[str, int]:
        return await self._reasons(self.keys.expired_reasons)

    async def evaluation_scores(self) -> dict[str, float]:
        scores = await guarded(self.client.hgetall(self.keys.scores))
        return {benchmark.decode(): float(score) for benchmark, score in scores.items()}

    async def evaluation_history(self) -> dict[str, float]:
        scores = await guarded(self.client.hgetall(self.keys.score_history))
        return {evaluation_id.decode(): float(score) for evaluation_id, score in scores.items()}

    # ── rollout server ──

    async def lease(self, server_id: str, max_prompts: int) -> list[Lease]:
        config = self.config
        leased = read_columns(await self._call(
            "lease", server_id, max_prompts, self._lease_ttl_ms, config.groups_per_step, config.max_staleness,
            config.capacity_bytes, config.max_attempts, int(config.settle_s * 1000),
            int(config.breaker.probe_s * 1000) if config.breaker.failures else 0,
        ))  # fmt: skip
        return [Lease(*row) for row in zip(leased["prompt_id"], leased["attempt"], leased["payload"], strict=True)]

    async def wait_for_prompts(self, timeout_s: float) -> None:
        await self._wait(self.keys.lease_signals, timeout_s)

    async def heartbeat(self, server_id: str, leases: Sequence[Lease]) -> list[int]:
        if not leases:
            return []
        lost: list[int] = await self._call("heartbeat", server_id, self._lease_ttl_ms, *_pairs(leases))
        return lost

    async def append(self, lease: Lease, payload: bytes, min_version: int) -> AppendOutcome:
        return (await self.append_many([FinishedGroup(lease, payload, min_version)]))[0]

    async def append_many(self, groups: Sequence[FinishedGroup]) -> list[AppendOutcome]:
        return await self.payloads.append(groups, self.config)

    async def record_evaluation(
        self, evaluation_id: str, lease: Lease, rewards: Sequence[float], min_version: int, max_version: int,
        data_source: str = "", answers: Sequence[str] = (), kept_group: bytes = b"", accuracies: Sequence[float] = (),
    ) -> None:  # fmt: skip
        await self._call(
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
        refused: list[int] = await self._call("save_tokens", server_id, max_bytes, *flat)
        return refused

    async def saved_tokens(self, lease: Lease) -> list[SavedTokens]:
        pieces = []
        for value in filter(None, await guarded(self.client.hvals(self.keys.saved(lease.prompt_id)))):
            sample, start, payload = value.split(b":", 2)
            pieces.append(SavedTokens(int(sample), int(start), payload))
        return sorted(pieces, key=lambda piece: (piece.sample, piece.start))

    async def forget_tokens(self, server_id: str, lease: Lease) -> None:
        await self._call("forget_tokens", server_id, lease.prompt_id, lease.attempt)

    async def give_back(
        self, server_id: str, lease: Lease, failure: str = "", *, is_final: bool = False, num_running: int = 0,
        forget_saved: bool = False,
    ) -> bool:  # fmt: skip
        max_attempts, breaker = 1 if is_final else self.config.max_attempts, self.config.breaker
        return bool(await self._call(
            "give_back", server_id, lease.prompt_id, lease.attempt, failure, max_attempts, int(is_final), num_running,
            breaker.failures, breaker.non_finite_failures, int(breaker.probe_s * 1000), int(forget_saved),
        ))  # fmt: skip

    async def reconcile(self, held: Sequence[Lease]) -> Outbox:
        if not held:
            return Outbox((), ())
        answer = read_record(await self._call("reconcile", *_pairs(held)))
        return Outbox(tuple(answer["done"]), tuple(answer["missing"]))

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

    async def feeds(self) -> dict[str, FeedPosition]:
        fields = await guarded(self.client.hgetall(self.keys.feeds))
        return {
            name.decode(): FeedPosition(
                int(position), fields.get(name + b":fingerprint", b"").decode(), int(fields.get(name + b":prompts", 0))
            )
            for name, position in fields.items()
            if b":" not in name
        }

    async def finish(self, step: int) -> None:
        await self._call("finish", self.term, step)

    async def take(self, step: int, max_groups: int) -> list[int]:
        known = self._manifests.setdefault(step, [])
        limits = (max_groups, self.config.take_order, self.config.capacity_bytes)
        taken, self._fetched_ahead = await self.payloads.take(self.term, step, *limits, *known)
        self._attempts |= taken
        known += taken
        return list(taken)

    async def wait_for_groups(self, timeout_s: float) -> None:
        """Every change that lets a group be taken adds an entry to the results: an append, a burial, a cancellation."""
        await self._wait(self.keys.results, timeout_s)

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
            located = await self._call("locate", *unknown)
            keys = {prompt_id: key for prompt_id, key in zip(unknown, located, strict=True) if key}
            payloads |= await self.payloads.fetch(keys)
        return [Delivery(prompt_id, payloads[prompt_id]) for prompt_id in prompt_ids if prompt_id in payloads]

    async def prompts(self, prompt_ids: Sequence[int]) -> list[bytes]:
        payloads: list[bytes] = []
        for first in range(0, len(prompt_ids), PROMPTS_AT_ONCE):
            some = prompt_ids[first : first + PROMPTS_AT_ONCE]
            payloads += [found or b"" for found in await guarded(self.client.hmget(self.keys.prompts, some))]
        return payloads

    async def commit(self, step: int, prompt_ids: Sequence[int], oldest_step: int = 0) -> int:
        committed: int = await self._call("commit", self.term, step, oldest_step, " ".join(map(str, prompt_ids)))
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
        num_missing: int = await self._call("go_back", self.term, checkpoint, step, *prompt_ids)
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
        await self._call("publish", self.term, policy_version, step, policy)

    async def allocate_version(self, at_least: int) -> int:
        version: int = await self._call("allocate_version", self.term, at_least)
        return version

    # ── private ──

    async def _drop(self, how: str, prompt_id: int, reason: str) -> None:
        """Remove a group, also from the manifests: the prompt may be taken again, and is then news to this learner."""
        self._forget_fetched([prompt_id])
        await self._call(how, self.term, prompt_id, reason)
        for ids in self._manifests.values():
            if prompt_id in ids:
                ids.remove(prompt_id)

    def _forget_fetched(self, prompt_ids: Sequence[int]) -> None:
        for prompt_id in prompt_ids:
            self._fetched_ahead.pop(prompt_id, None)

    @property
    def _lease_ttl_ms(self) -> int:
        return int(self.config.lease_ttl_s * 1000)

    async def _wait(self, stream: str, timeout_s: float) -> None:
        """Block on a connection of its own until the stream has an entry that no wait has seen, or for `timeout_s`."""
        block_ms = max(1, int(1000 * min(timeout_s, self.client.max_block_s)))
        found = await guarded(self.client.xread({stream: self._seen.get(stream, b"0-0")}, count=1, block=block_ms))
        if found and stream == self.keys.lease_signals:  # it has one entry, so that is the newest
            self._seen[stream] = found[0][1][0][0]
        elif found:
            for entry_id, _ in await guarded(self.client.xrevrange(stream, count=1)):
                self._seen[stream] = entry_id

    async def _reasons(self, key: str) -> dict[str, int]:
        reasons = await guarded(self.client.hgetall(key))
        return {reason.decode(): int(count) for reason, count in reasons.items()}

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await QUEUE.call(self.client, self.keys.prefix, name, *arguments)


def _pairs(leases: Sequence[Lease]) -> list[int]:
    return [number for lease in leases for number in (lease.prompt_id, lease.attempt)]
