"""The calls of the gateway and of the feed, on a queue in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.config.service import ReplayConfig
from penstock.errors import NotFound
from penstock.replay.evaluations import Evaluation
from penstock.replay.in_memory.records import MemoryEvaluation, MemoryPrompt
from penstock.replay.in_memory.store import MemoryStore
from penstock.replay.queue_types import FeedPosition, PromptState, PromptStatus, QueueStat, Submission
from penstock.sample_scores import scores_by_source, summarise


class MemoryIntake:
    """PromptIntake over a store."""

    def __init__(self, store: MemoryStore, config: ReplayConfig) -> None:
        self.store = store
        self.config = config

    async def submit(self, payloads: Sequence[bytes], priorities: Sequence[int], idempotency_key: str) -> Submission:
        store = self.store
        if idempotency_key and idempotency_key in store.submissions:
            return Submission(tuple(store.submissions[idempotency_key]), replayed=True)
        ids = store.add_prompts(payloads, priorities)
        if idempotency_key:
            store.submissions[idempotency_key] = ids
        return Submission(tuple(ids), replayed=False)

    async def feed(
        self, name: str, fingerprint: str, position: int, payloads: Sequence[bytes], priorities: Sequence[int],
        epoch_prompts: int = 0,
    ) -> FeedPosition:  # fmt: skip
        stored = self.store.feeds.get(name, FeedPosition(0, fingerprint))
        if stored.fingerprint != fingerprint:
            return stored
        if payloads and stored.position == position:
            self.store.add_prompts(payloads, priorities)
            stored = replace(stored, position=position + len(payloads))
        stored = replace(stored, epoch_prompts=epoch_prompts or stored.epoch_prompts)
        if stored.position or stored.epoch_prompts:
            self.store.feeds[name] = stored
        return replace(stored, last_id=self.store.counters["next_prompt_id"])

    async def create_evaluation(self, evaluation_id: str, payloads: Sequence[bytes]) -> Evaluation:
        store = self.store
        if evaluation_id not in store.evaluations:
            store.evaluations[evaluation_id] = MemoryEvaluation(len(payloads))
            for payload in payloads:
                prompt_id = store.count("next_prompt_id")
                store.prompts[prompt_id] = MemoryPrompt(payload, evaluation_id=evaluation_id)
                store.eval_pending.put(prompt_id, prompt_id)
            store.lease_signal.send()
        return await self.get_evaluation(evaluation_id)

    async def get_evaluation(self, evaluation_id: str) -> Evaluation:
        found = self.store.evaluations.get(evaluation_id)
        if found is None:
            raise NotFound(f"evaluation {evaluation_id!r} does not exist")
        summary = summarise(found.rewards)
        low, high = (min(found.versions), max(found.versions)) if found.versions else (-1, -1)
        return Evaluation(
            evaluation_id, found.num_prompts, found.num_finished, summary.mean, low, high, summary.num_samples,
            summary.pass_at, found.num_failed, scores_by_source(found.samples),
        )  # fmt: skip

    async def record_scores(self, number: int, scores: Mapping[str, float]) -> None:
        for name, value in scores.items():
            self.store.keep_score(name, f"{name}-{number}", value)

    async def get_prompt(self, prompt_id: int) -> PromptStatus:
        store = self.store
        if prompt_id in store.trained:
            return PromptStatus(prompt_id, "trained", 0, b"")
        if prompt_id in store.buried:
            return PromptStatus(prompt_id, "dead_lettered", 0, b"")
        prompt = store.prompts.get(prompt_id)
        if prompt is None and prompt_id in store.cancelled:
            return PromptStatus(prompt_id, "cancelled", 0, b"")
        if prompt is None:
            raise NotFound(f"prompt {prompt_id} does not exist, or was discarded")
        if prompt_id in store.groups:
            return PromptStatus(prompt_id, "queued", prompt.attempt, prompt.payload)
        return PromptStatus(prompt_id, "leased" if prompt.owner else "pending", prompt.attempt, prompt.payload)

    async def cancel(self, prompt_ids: Sequence[int]) -> list[PromptStatus | None]:
        """Cancel the prompts whose groups the learner has not taken. Returns the status of each afterwards; None for an
        unknown prompt."""
        return [self._cancel(prompt_id) for prompt_id in prompt_ids]

    async def get_group(self, prompt_id: int) -> bytes:
        if prompt_id not in self.store.groups:
            raise NotFound(f"no group of prompt {prompt_id} is queued; it is not finished, or already trained")
        return self.store.groups[prompt_id].payload

    async def stat(self) -> QueueStat:
        store, count, state = self.store, self.store.counters, self.store.admission(self.config)
        return QueueStat(
            pending_prompts=len(store.pending), in_flight=store.in_flight, queued=store.queued,
            delivered=len(store.delivered), pending_age_ms=store.pending_age_ms, ready_age_ms=store.ready_age_ms,
            admission_limit=state.limit, admission_room=state.room,
            finished_step=store.finished_step,
            **{
                name: count[name]
                for name in (
                    "admitted", "queued_bytes", "trained", "expired", "dead_lettered", "redelivered", "reclaimed",
                    "discarded", "inserted", "saved_bytes", "step", "committed_step", "policy_version", "term",
                )
            },
        )  # fmt: skip

    async def dead_letter_reasons(self) -> dict[str, int]:
        return dict(self.store.dead_reasons)

    async def expired_reasons(self) -> dict[str, int]:
        return dict(self.store.expired_reasons)

    async def evaluation_scores(self) -> dict[str, float]:
        return dict(self.store.scores)

    async def evaluation_history(self) -> dict[str, float]:
        return dict(self.store.score_history)

    def _cancel(self, prompt_id: int) -> PromptStatus | None:
        store = self.store
        prompt = store.prompts.get(prompt_id)
        if prompt is None:
            ended: tuple[tuple[PromptState, set[int]], ...] = (
                ("trained", store.trained), ("dead_lettered", store.buried), ("cancelled", store.cancelled),
            )  # fmt: skip
            return next((PromptStatus(prompt_id, state, 0, b"") for state, ids in ended if prompt_id in ids), None)
        if prompt_id in store.delivered or prompt.evaluation_id:
            now: PromptState = "queued" if prompt_id in store.groups else "leased" if prompt.owner else "pending"
            return PromptStatus(prompt_id, now, prompt.attempt, b"")
        was_queued = store.remove_group(prompt_id) is not None
        was_in_flight = store.leases.remove(prompt_id) or prompt_id in store.returned
        store.returned.discard(prompt_id)
        store.pending.remove(prompt_id)
        store.open.remove(prompt_id)
        if was_queued or was_in_flight:
            store.count("expired")
            store.count("discarded")
            store.expired_reasons["cancelled"] += 1
        store.cancelled.add(prompt_id)
        store.drop_saved(prompt_id)
        del store.prompts[prompt_id]
        return PromptStatus(prompt_id, "cancelled", prompt.attempt, b"")
