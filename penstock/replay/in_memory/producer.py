"""The calls of a rollout server, on a queue in memory."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from penstock.config.service import ReplayConfig
from penstock.replay.breaker import Breaker, Verdict
from penstock.replay.evaluations import KEPT_EVALUATION_S, KEPT_EVALUATION_SHARE
from penstock.replay.in_memory.records import MemoryGroup
from penstock.replay.in_memory.redis_types import NEVER, Ordered
from penstock.replay.in_memory.store import MemoryStore
from penstock.replay.queue_types import SAVED_SHARE, AppendOutcome, FinishedGroup, Lease, Outbox, SavedTokens
from penstock.sample_scores import PromptSamples


class MemoryProducer:
    """GroupProducer over a store."""

    def __init__(self, store: MemoryStore, config: ReplayConfig) -> None:
        self.store = store
        self.config = config
        self._seen_lease_signals = 0

    async def lease(self, server_id: str, max_prompts: int) -> list[Lease]:
        store = self.store
        self._reclaim()
        if store.is_paused or server_id in store.drained:
            return []
        if server_id not in store.quarantined:
            return self._lease_by_breaker(server_id, max_prompts)
        if not (probes := min(max_prompts, store.quarantined[server_id])):
            return []
        leases = self._lease_by_breaker(server_id, probes)
        store.quarantined[server_id] -= len(leases)
        for lease in leases:  # a probe must be sampled by this server alone
            store.drop_saved(lease.prompt_id)
        return leases

    def _lease_by_breaker(self, server_id: str, max_prompts: int) -> list[Lease]:
        store, config = self.store, self.config
        breaker = store.breakers.get(server_id) if config.breaker.failures else None
        if breaker is None:
            return self._lease(server_id, max_prompts, {})
        if not breaker.is_open:
            others = self._lease(server_id, max_prompts, breaker.prompts)
            return others + self._lease(server_id, max_prompts - len(others), {})
        # A pinned server stays at its version, so a new one is no reason to probe.
        version = breaker.policy_version if server_id in store.pins else store.counters["policy_version"]
        if not breaker.may_probe(store.clock(), version):
            return []
        leases = self._probe(server_id, min(max_prompts, 1), breaker)
        if not leases:  # all prompts in line were tried before
            breaker.prompts.clear()
            leases = self._probe(server_id, min(max_prompts, 1), breaker)
        if leases:
            breaker.record_probe(config.breaker, store.clock(), version)
        return leases

    def _probe(self, server_id: str, max_prompts: int, breaker: Breaker) -> list[Lease]:
        """Lease one prompt that was not tried. After a held-out prompt has failed, the other kind is preferred."""
        if breaker.failed_evaluation and (leases := self._lease_training(server_id, max_prompts, breaker.prompts)):
            return leases
        leases = self._lease_evaluations(server_id, max_prompts, breaker.prompts)
        return leases or self._lease_training(server_id, max_prompts, breaker.prompts)

    def _lease(self, server_id: str, max_prompts: int, skipped: Container[int]) -> list[Lease]:
        """Share the places between held-out prompts and training prompts: the held-out ones come first, until as many
        of them as of the others are leased. Either kind takes what the other leaves."""
        share = math.ceil((max_prompts + len(self.store.leases) - len(self.store.eval_leases)) / 2)
        leases = self._lease_evaluations(server_id, min(share, max_prompts), skipped)
        leases += self._lease_training(server_id, max_prompts - len(leases), skipped)
        return leases + self._lease_evaluations(server_id, max_prompts - len(leases), skipped)

    def _lease_evaluations(self, server_id: str, max_prompts: int, skipped: Container[int]) -> list[Lease]:
        store = self.store
        durable_id = store.newest_durable_id(self.config.settle_s)
        waiting = store.eval_pending.lowest(len(store.eval_pending), below=durable_id + 1)
        answerable = [i for i in waiting if i not in skipped and self._may_answer(server_id, i)]
        evaluations = answerable[: max(0, max_prompts)]
        for prompt_id in evaluations:
            store.eval_pending.remove(prompt_id)
        return [self._grant(server_id, prompt_id, store.eval_leases) for prompt_id in evaluations]

    def _lease_training(self, server_id: str, max_prompts: int, skipped: Container[int]) -> list[Lease]:
        store, config, leases = self.store, self.config, list[Lease]()
        durable_id = store.newest_durable_id(config.settle_s)
        room = store.admission(config).room
        if store.counters["queued_bytes"] >= config.capacity_bytes:
            room = 0
        for prompt_id in store.pending.lowest(len(store.pending)):
            if len(leases) == max_prompts or server_id in store.pins:
                break
            if prompt_id > durable_id or prompt_id in skipped:
                continue
            if prompt_id not in store.returned:
                if room <= 0:
                    break
                room -= 1
                store.count("admitted")
                store.open.put(prompt_id, store.count("admission"))
            store.returned.discard(prompt_id)
            store.pending.remove(prompt_id)
            leases.append(self._grant(server_id, prompt_id, store.leases))
        return leases

    async def wait_for_prompts(self, timeout_s: float) -> None:
        self._seen_lease_signals = await self.store.lease_signal.wait(self._seen_lease_signals, timeout_s)

    async def heartbeat(self, server_id: str, leases: Sequence[Lease]) -> list[int]:
        expiry, lost = self.store.clock() + self.config.lease_ttl_s, []
        for lease in leases:
            if not self._holds(server_id, lease):
                lost.append(lease.prompt_id)
            elif lease.prompt_id in self.store.leases:
                self.store.leases.put(lease.prompt_id, expiry)
            else:
                self.store.eval_leases.put(lease.prompt_id, expiry)
        return lost

    async def append(self, lease: Lease, payload: bytes, min_version: int) -> AppendOutcome:
        store, prompt_id = self.store, lease.prompt_id
        if prompt_id in store.groups:
            return "duplicate"
        if prompt_id not in store.prompts:
            return "duplicate" if prompt_id in store.trained else "unknown"
        in_queue = store.counters["queued_bytes"]
        is_over = in_queue > 0 and in_queue + len(payload) > self.config.capacity_bytes
        if is_over and not self._is_waited_for(prompt_id):
            return "full"
        if self.config.take_order == "admission":
            self._restore_admissions(prompt_id)
        store.record_success(prompt_id)
        store.drop_saved(prompt_id)
        number = store.release_admission(prompt_id)
        store.groups[prompt_id] = MemoryGroup(lease.attempt, payload, number, min_version, store.clock())
        store.make_ready(prompt_id)
        store.count("inserted")
        store.result_signal.send()
        return "accepted"

    async def append_many(self, groups: Sequence[FinishedGroup]) -> list[AppendOutcome]:
        return [await self.append(group.lease, group.payload, group.min_version) for group in groups]

    async def record_evaluation(
        self, evaluation_id: str, lease: Lease, rewards: Sequence[float], min_version: int, max_version: int,
        data_source: str = "", answers: Sequence[str] = (), kept_group: bytes = b"", accuracies: Sequence[float] = (),
    ) -> None:  # fmt: skip
        if lease.prompt_id not in self.store.prompts:
            return
        self.store.record_success(lease.prompt_id)
        self.store.drop_saved(lease.prompt_id)
        del self.store.prompts[lease.prompt_id]
        self.store.eval_leases.remove(lease.prompt_id)
        self.store.eval_pending.remove(lease.prompt_id)
        evaluation = self.store.evaluations[evaluation_id]
        evaluation.rewards.append(list(rewards))
        evaluation.samples.append(PromptSamples(data_source, tuple(rewards), tuple(answers), tuple(accuracies)))
        evaluation.versions += (min_version, max_version)
        if kept_group:
            max_bytes = self.config.capacity_bytes // KEPT_EVALUATION_SHARE
            evaluation.keep(lease.prompt_id, kept_group, max_bytes, self.store.clock() + KEPT_EVALUATION_S)
        self.store.finish_evaluation_prompt(evaluation_id)

    async def save_tokens(self, server_id: str, pieces: Sequence[tuple[Lease, SavedTokens]]) -> list[int]:
        store, max_bytes, refused = self.store, self.config.capacity_bytes // SAVED_SHARE, list[int]()
        for lease, piece in pieces:
            prompt = store.prompts.get(lease.prompt_id)
            replaced = prompt.saved.get((piece.sample, piece.start), b"") if prompt else b""
            added = len(piece.payload) - len(replaced)
            is_over = store.counters["saved_bytes"] + added > max_bytes
            if prompt is None or not self._holds(server_id, lease) or server_id in store.quarantined or is_over:
                refused.append(lease.prompt_id)
                continue
            prompt.saved[piece.sample, piece.start] = piece.payload
            prompt.saved_from.add(server_id)
            store.count("saved_bytes", added)
        return refused

    async def saved_tokens(self, lease: Lease) -> list[SavedTokens]:
        prompt = self.store.prompts.get(lease.prompt_id)
        saved = prompt.saved if prompt else {}
        return [SavedTokens(*place, payload) for place, payload in sorted(saved.items())]

    async def forget_tokens(self, server_id: str, lease: Lease) -> None:
        if self._holds(server_id, lease):
            self.store.drop_saved(lease.prompt_id)

    async def give_back(
        self, server_id: str, lease: Lease, failure: str = "", *, is_final: bool = False, num_running: int = 0,
        forget_saved: bool = False,
    ) -> bool:  # fmt: skip
        if not self._holds(server_id, lease):
            return False
        if forget_saved:
            self.store.drop_saved(lease.prompt_id)
        max_attempts = 1 if is_final else self.config.max_attempts
        verdict: Verdict = "counted"
        if failure and not is_final:
            verdict = self.store.record_failure(
                self.config.breaker, server_id, lease.prompt_id, failure, num_running, max_attempts
            )
        if verdict != "counted":
            failure = ""
        if lease.prompt_id in self.store.eval_leases:
            evaluation_id = self.store.prompts[lease.prompt_id].evaluation_id
            self.store.return_evaluation(lease.prompt_id, failure, max_attempts)
            if verdict == "given_up":
                self.store.give_up_evaluation(evaluation_id)
        else:
            self.store.return_prompt(lease.prompt_id, failure, max_attempts)
        return verdict == "opened"

    async def reconcile(self, held: Sequence[Lease]) -> Outbox:
        done, missing = [], []
        for lease in held:
            prompt = self.store.prompts.get(lease.prompt_id)
            if prompt is None or (lease.prompt_id not in self.store.groups and prompt.attempt > lease.attempt):
                done.append(lease.prompt_id)
            elif lease.prompt_id not in self.store.groups:
                missing.append(lease.prompt_id)
        return Outbox(tuple(done), tuple(missing))

    def _reclaim(self) -> None:
        now = self.store.clock()
        for prompt_id in self.store.leases.lowest(256, below=now):
            self.store.count("reclaimed")
            self.store.return_prompt(prompt_id, "lease_expired", self.config.max_attempts)
        for prompt_id in self.store.eval_leases.lowest(256, below=now):
            self.store.return_evaluation(prompt_id, "lease_expired", self.config.max_attempts)

    def _grant(self, server_id: str, prompt_id: int, leases: Ordered) -> Lease:
        prompt = self.store.prompts[prompt_id]
        prompt.attempt += 1
        prompt.owner = (server_id, prompt.attempt)
        leases.put(prompt_id, self.store.clock() + self.config.lease_ttl_s)
        return Lease(prompt_id, prompt.attempt, prompt.payload)

    def _may_answer(self, server_id: str, prompt_id: int) -> bool:
        """A pinned evaluation waits for a server with its version, and a pinned server answers nothing else. A server
        in quarantine answers none."""
        if server_id in self.store.quarantined:
            return False
        pinned = self.store.pins.get(self.store.prompts[prompt_id].evaluation_id)
        if pinned is None:
            return server_id not in self.store.pins
        return pinned == self.store.served_versions.get(server_id)

    def _holds(self, server_id: str, lease: Lease) -> bool:
        prompt = self.store.prompts.get(lease.prompt_id)
        return prompt is not None and prompt.owner == (server_id, lease.attempt)

    def _restore_admissions(self, prompt_id: int) -> None:
        """Admit the prompts that were leased before this one, if Redis has lost that they and this one were."""
        store = self.store
        if prompt_id not in store.pending or prompt_id in store.open:
            return
        line = store.pending.lowest(len(store.pending))
        for other in line[: line.index(prompt_id)]:
            if other not in store.open and store.prompts[other].priority == store.prompts[prompt_id].priority:
                store.count("admitted")
                store.open.put(other, store.count("admission"))
                store.returned.add(other)
                store.pending.put(other, -NEVER)
        store.open.put(prompt_id, store.count("admission"))

    def _is_waited_for(self, prompt_id: int) -> bool:
        """Whether all ready groups wait for the group of this prompt."""
        number = self.store.open.score(prompt_id)
        if self.config.take_order != "admission" or number is None:
            return False
        return number == self.store.open.lowest_score < self.store.ready.lowest_score
