"""The calls of the gateway and of the feed, on Redis."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import NotFound
from penstock.replay.on_redis.script_calls import ScriptCalls
from penstock.replay.queue_types import Evaluation, FeedPosition, PromptStatus, QueueStat, Submission, admission
from penstock.sample_scores import PromptSamples, scores_by_source, summarise
from penstock.store.redis_client import guarded
from penstock.store.scripts import read_record, read_rows

IDEMPOTENCY_TTL_S = 7 * 24 * 3600


class RedisIntake(ScriptCalls):
    """PromptIntake of one run."""

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
            for row in read_rows(await self.call("submit", IDEMPOTENCY_TTL_S, int(all_or_none), *flat))
        ]

    async def feed(
        self, name: str, fingerprint: str, position: int, payloads: Sequence[bytes], priorities: Sequence[int],
        epoch_prompts: int = 0,
    ) -> FeedPosition:  # fmt: skip
        flat = [item for pair in zip(payloads, priorities, strict=True) for item in pair]
        feed = read_record(await self.call("feed", name, fingerprint, position, epoch_prompts, *flat))
        return FeedPosition(feed["position"], feed["fingerprint"].decode(), feed["epoch_prompts"], feed["last_id"])

    async def feeds(self) -> dict[str, FeedPosition]:
        fields = await guarded(self.client.hgetall(self.keys.feeds))
        return {
            name.decode(): FeedPosition(
                int(position), fields.get(name + b":fingerprint", b"").decode(), int(fields.get(name + b":prompts", 0))
            )
            for name, position in fields.items()
            if b":" not in name
        }

    async def create_evaluation(self, evaluation_id: str, payloads: Sequence[bytes]) -> Evaluation:
        await self.call("create_evaluation", evaluation_id, *payloads)
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
        await self.call("record_scores", number, *flat)

    async def get_prompt(self, prompt_id: int) -> PromptStatus:
        found = read_record(await self.call("get_prompt", prompt_id))
        if not found:
            raise NotFound(f"prompt {prompt_id} does not exist, or was discarded")
        return PromptStatus(prompt_id, found["state"].decode(), found["attempt"], found["payload"])

    async def get_group(self, prompt_id: int) -> bytes:
        payloads = await self.fetch_located([prompt_id])
        if not payloads:
            raise NotFound(f"no group of prompt {prompt_id} is queued; it is not finished, or already trained")
        return payloads[prompt_id]

    async def waiting(self) -> set[int]:
        """The prompts whose groups wait for the learner."""
        return {int(prompt_id) for prompt_id in await guarded(self.client.zrange(self.keys.ready, 0, -1))}

    async def taken(self) -> set[int]:
        """The prompts whose groups the learner has taken and not committed."""
        return {int(prompt_id) for prompt_id in await guarded(self.client.smembers(self.keys.delivered))}

    async def stat(self) -> QueueStat:
        numbers = read_record(await self.call("stat"))
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

    async def _reasons(self, key: str) -> dict[str, int]:
        reasons = await guarded(self.client.hgetall(key))
        return {reason.decode(): int(count) for reason, count in reasons.items()}
