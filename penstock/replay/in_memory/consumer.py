"""The calls of the learner, on a queue in memory."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config.service import ReplayConfig
from penstock.errors import Conflict, Fenced
from penstock.replay.evaluations import KeptGroups
from penstock.replay.in_memory.records import MemoryGroup, MemoryPrompt
from penstock.replay.in_memory.redis_types import NEVER
from penstock.replay.in_memory.store import MemoryStore, reason_label
from penstock.replay.queue_types import Committed, Delivery, FeedPosition, GoneBack


class MemoryConsumer:
    """GroupConsumer over a store, without the calls that MemoryIntake has too. `term` is 0 until `take_term` was
    called."""

    def __init__(self, store: MemoryStore, config: ReplayConfig) -> None:
        self.store = store
        self.config = config
        self.term = 0
        self._known: set[tuple[int, int]] = set()
        """Step and prompt id of the groups in the manifests that this learner knows."""
        self._seen_result_signals = 0

    async def store_id(self) -> str:
        return self.store.store_id

    async def take_term(self, at_least: int) -> int:
        self.term = self.store.counters["term"] = max(self.store.counters["term"], at_least) + 1
        return self.term

    async def restore(self, step: int) -> dict[int, list[int]]:
        self._check_term()
        self.store.counters["step"] = step
        self.store.lease_signal.send()
        for of_step, ids in self.store.manifests.items():
            if of_step > step:
                self.store.count("redelivered", sum(prompt_id in self.store.groups for prompt_id in ids))
        manifests = {of_step: list(ids) for of_step, ids in self.store.manifests.items()}
        self._known = {(of_step, prompt_id) for of_step, ids in manifests.items() for prompt_id in ids}
        return manifests

    async def kept_groups(self, evaluation_id: str) -> KeptGroups:
        found = self.store.evaluations.get(evaluation_id)
        if found is None:
            return KeptGroups()
        if self.store.clock() >= found.kept_until:
            found.kept.clear()
        return KeptGroups(tuple(sorted(found.kept)), found.num_left_out)

    async def fetch_kept(self, evaluation_id: str, prompt_ids: Sequence[int]) -> list[bytes]:
        kept = self.store.evaluations[evaluation_id].kept
        return [kept[prompt_id] for prompt_id in prompt_ids if prompt_id in kept]

    async def forget_kept(self, evaluation_id: str) -> None:
        self.store.evaluations[evaluation_id].kept.clear()

    async def feeds(self) -> dict[str, FeedPosition]:
        return dict(self.store.feeds)

    async def finish(self, step: int) -> None:
        self._check_term()
        self.store.finished_step = step

    async def take(self, step: int, max_groups: int) -> list[int]:
        self._check_term()
        store, order = self.store, self.config.take_order
        unknown = [
            prompt_id
            for prompt_id in store.manifests.get(step, [])
            if (step, prompt_id) not in self._known and prompt_id in store.delivered
        ]
        if unknown:
            self._known.update((step, prompt_id) for prompt_id in unknown)
            return unknown
        if order == "freshest":
            ids = store.fresh.highest(max_groups)
        else:
            ids = store.ready.lowest(max_groups, store.open.lowest_score if order == "admission" else NEVER)
        for prompt_id in ids:
            store.unready(prompt_id)
            store.delivered.add(prompt_id)
        if ids:
            store.lease_signal.send()
            store.manifests.setdefault(step, []).extend(ids)
            self._known.update((step, prompt_id) for prompt_id in ids)
        return ids

    async def wait_for_groups(self, timeout_s: float) -> None:
        self._seen_result_signals = await self.store.result_signal.wait(self._seen_result_signals, timeout_s)

    async def fetch(self, prompt_ids: Sequence[int]) -> list[Delivery]:
        groups = self.store.groups
        return [Delivery(prompt_id, groups[prompt_id].payload) for prompt_id in prompt_ids if prompt_id in groups]

    async def prompts(self, prompt_ids: Sequence[int]) -> list[bytes]:
        prompts = self.store.prompts
        return [prompts[prompt_id].payload if prompt_id in prompts else b"" for prompt_id in prompt_ids]

    async def commit(self, step: int, prompt_ids: Sequence[int], oldest_step: int = 0) -> int:
        self._check_term()
        store, found = self.store, 0
        committed_step = store.counters["committed_step"] = max(store.counters["committed_step"], step)
        for prompt_id in prompt_ids:
            if prompt_id in store.prompts:
                if store.remove_group(prompt_id) is None:
                    store.release_admission(prompt_id)
                store.drop_saved(prompt_id)
                store.kept.setdefault(committed_step, {})[prompt_id] = store.prompts.pop(prompt_id)
                store.count("trained")
                found += 1
            store.trained.add(prompt_id)
        for of_step in [of_step for of_step in store.manifests if of_step <= step]:
            for prompt_id in store.manifests.pop(of_step):
                if prompt_id in store.delivered:
                    store.delivered.remove(prompt_id)
                    store.make_ready(prompt_id)
        self._known = {(of_step, prompt_id) for of_step, prompt_id in self._known if of_step > step}
        store.counters["kept_after"] = max(store.counters["kept_after"], oldest_step)
        store.kept = {of_step: kept for of_step, kept in store.kept.items() if of_step > oldest_step}
        return found

    async def committed(self) -> Committed:
        store = self.store
        trained = bytearray(max(store.trained, default=-1) // 8 + 1)
        for prompt_id in store.trained:
            trained[prompt_id // 8] |= 128 >> prompt_id % 8
        return Committed(
            store.counters["committed_step"], bytes(trained), store.counters["kept_after"], store.gone_back
        )

    async def go_back(self, checkpoint: str, step: int, prompt_ids: Sequence[int]) -> None:
        self._check_term()
        store = self.store
        kept = {prompt_id: prompt for prompts in store.kept.values() for prompt_id, prompt in prompts.items()}
        if missing := set(prompt_ids) - kept.keys():
            raise Conflict(f"{len(missing)} prompts that were trained after step {step} are no longer kept")
        for prompt_id in prompt_ids:
            store.prompts[prompt_id] = MemoryPrompt(
                kept[prompt_id].payload, kept[prompt_id].priority, attempt=kept[prompt_id].attempt + 1
            )
            store.trained.remove(prompt_id)
            store.make_pending(prompt_id)
            store.count("trained", -1)
            store.count("expired")
            store.expired_reasons["abandoned"] += 1
        store.kept = {
            of_step: {prompt_id: prompt for prompt_id, prompt in prompts.items() if prompt_id not in prompt_ids}
            for of_step, prompts in store.kept.items()
            if of_step <= step
        }
        for prompt_id in sorted(store.delivered):
            store.delivered.remove(prompt_id)
            store.make_ready(prompt_id)
        store.manifests.clear()
        for prompt_id in store.prompts:
            store.drop_saved(prompt_id)
        self._known.clear()
        store.counters["step"] = store.counters["committed_step"] = step
        store.gone_back = GoneBack(checkpoint, self.term, 0)
        store.lease_signal.send()

    async def expire(self, prompt_id: int, reason: str = "stale") -> None:
        self._check_term()
        if self._drop(prompt_id) is not None:
            self.store.prompts[prompt_id].attempt += 1
            self.store.count("expired")
            self.store.expired_reasons[reason_label(reason)] += 1
            self.store.make_pending(prompt_id)

    async def discard(self, prompt_id: int, reason: str) -> None:
        self._check_term()
        if self._drop(prompt_id) is not None:
            self.store.drop_saved(prompt_id)
            del self.store.prompts[prompt_id]
            self.store.count("expired")
            self.store.count("discarded")
            self.store.expired_reasons[reason_label(reason)] += 1

    async def dead_letter(self, prompt_id: int, reason: str) -> None:
        self._check_term()
        group = self._drop(prompt_id)
        if group is not None:
            self.store.bury(prompt_id, reason, group.payload)

    async def publish(self, policy_version: int, step: int, policy: bytes) -> None:
        self._check_term()
        self.store.counters["policy_version"] = policy_version
        self.store.counters["step"] = step
        self.store.policies[policy_version] = policy
        self.store.lease_signal.send()

    async def allocate_version(self, at_least: int) -> int:
        self._check_term()
        count = self.store.counters
        count["allocated_version"] = max(count["allocated_version"] + 1, at_least)
        return count["allocated_version"]

    def _check_term(self) -> None:
        current = self.store.counters["term"]
        if self.term != current:
            raise Fenced(
                f"term {self.term} has passed; the current one is {current}; another learner has taken over, stop "
                "this one"
            )

    def _drop(self, prompt_id: int) -> MemoryGroup | None:
        self._known = {(of_step, known_id) for of_step, known_id in self._known if known_id != prompt_id}
        return self.store.remove_group(prompt_id)
