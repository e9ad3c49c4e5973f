"""The replay queue in memory, for tests. It is also the simplest description of what the Lua scripts do.

Calls do not await anything, so each is atomic within one event loop. Several queue objects, each with its own term, may
share one `MemoryStore`, as a learner and its successor share Redis. The orders of operators are fields of the store: a
test sets `is_paused`, `drained`, `quarantined`, `pins` and `served_versions`, and `lease` follows them. The stream of
results exists only in Redis.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from penstock.codec import encode_group
from penstock.config.service import ReplayConfig
from penstock.errors import Conflict, Fenced, NotFound
from penstock.replay.queue_types import (
    ALL_PROMPTS,
    KEPT_EVALUATION_S,
    KEPT_EVALUATION_SHARE,
    SAVED_SHARE,
    AppendOutcome,
    Committed,
    Delivery,
    DropReason,
    Evaluation,
    FeedPosition,
    FinishedGroup,
    KeptGroups,
    Lease,
    OfferedGroup,
    Origin,
    Outbox,
    PromptState,
    PromptStatus,
    QueueStat,
    RunRewind,
    SavedTokens,
    Submission,
)
from penstock.sample_scores import Parts, PromptSamples, by_source, part_means, scores_by_source, summarise
from support.memory_store import (
    NEVER,
    Breaker,
    MemoryEvaluation,
    MemoryGroup,
    MemoryPrompt,
    MemoryStore,
    Ordered,
    Verdict,
    reason_label,
)


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
            first_id = store.counters["next_prompt_id"] + 1
            store.evaluations[evaluation_id] = MemoryEvaluation(len(payloads), first_id)
            for payload in payloads:
                prompt_id = store.count("next_prompt_id")
                store.prompts[prompt_id] = MemoryPrompt(payload, evaluation_id=evaluation_id)
                store.eval_pending.put(prompt_id, prompt_id)
            store.lease_signal.send()
        return await self.get_evaluation(evaluation_id)

    async def get_evaluation(self, evaluation_id: str, part: str = "") -> Evaluation:
        found = self.store.evaluations.get(evaluation_id)
        if found is None:
            raise NotFound(f"evaluation {evaluation_id!r} does not exist")
        summary = summarise(found.samples, part=part)
        low, high = (min(found.versions), max(found.versions)) if found.versions else (-1, -1)
        return Evaluation(
            evaluation_id, found.num_prompts, found.num_finished, summary.mean, low, high, summary.num_samples,
            summary.pass_at, found.num_failed, scores_by_source(found.samples),
            {source: means for source, own in by_source(found.samples).items() if (means := part_means(own))},
        )  # fmt: skip

    async def record_scores(
        self, number: int, scores: Mapping[str, float], details: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        for is_detail, named in ((False, scores), (True, details)):
            for name, value in named.items():
                self.store.keep_score(name, f"{name}-{number}", value, is_detail=is_detail)

    async def get_prompt(self, prompt_id: int) -> PromptStatus:
        store = self.store
        if prompt_id in store.trained:
            return PromptStatus(prompt_id, "trained", 0, b"")
        if prompt_id in store.dead_lettered:
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
                ("trained", store.trained), ("dead_lettered", store.dead_lettered), ("cancelled", store.cancelled),
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
        durable_id = store.newest_durable_id(self.config.loss_window_s)
        waiting = store.eval_pending.lowest(len(store.eval_pending), below=durable_id + 1)
        answerable = [i for i in waiting if i not in skipped and self._may_answer(server_id, i)]
        evaluations = answerable[: max(0, max_prompts)]
        for prompt_id in evaluations:
            store.eval_pending.remove(prompt_id)
        return [self._grant(server_id, prompt_id, store.eval_leases) for prompt_id in evaluations]

    def _lease_training(self, server_id: str, max_prompts: int, skipped: Container[int]) -> list[Lease]:
        store, config, leases = self.store, self.config, list[Lease]()
        durable_id = store.newest_durable_id(config.loss_window_s)
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

    async def accept(self, groups: Sequence[OfferedGroup], origin: Origin) -> list[tuple[int, AppendOutcome]]:
        store, leases = self.store, list[Lease | None]()
        for offered in groups:
            known = store.accepted.get((origin.key, offered.number))
            if known is None:
                known = store.accepted[origin.key, offered.number] = store.count("next_prompt_id")
                store.prompts[known] = MemoryPrompt(offered.prompt, priority=offered.priority)
                store.count("admitted")
                store.open.put(known, store.count("admission"))
            elif known in store.returned:
                store.returned.discard(known)
                store.pending.remove(known)
            elif known not in store.prompts or (store.prompts[known].owner or ("",))[0] != origin.name:
                leases.append(None)
                continue
            leases.append(self._grant(origin.name, known, store.leases))
        outcomes: list[tuple[int, AppendOutcome]] = []
        for offered, lease in zip(groups, leases, strict=True):
            outcome: AppendOutcome = "duplicate"
            if outcomes and outcomes[-1][1] == "full":
                outcome = "full"
            elif lease is not None:
                made = replace(offered.group, prompt_id=lease.prompt_id, attempt=lease.attempt)
                outcome = await self.append(lease, encode_group(made), made.min_version)
            outcomes.append((store.accepted[origin.key, offered.number], outcome))
        return outcomes

    async def record_evaluation(
        self, evaluation_id: str, lease: Lease, rewards: Sequence[float], min_version: int, max_version: int,
        data_source: str = "", answers: Sequence[str] = (), kept_group: bytes = b"", parts: Parts | None = None,
        num_kept: int = ALL_PROMPTS,
    ) -> None:  # fmt: skip
        if lease.prompt_id not in self.store.prompts:
            return
        prompt = self.store.prompts[lease.prompt_id].payload
        self.store.record_success(lease.prompt_id)
        self.store.drop_saved(lease.prompt_id)
        del self.store.prompts[lease.prompt_id]
        self.store.eval_leases.remove(lease.prompt_id)
        self.store.eval_pending.remove(lease.prompt_id)
        evaluation = self.store.evaluations[evaluation_id]
        evaluation.samples.append(PromptSamples(data_source, tuple(rewards), tuple(answers), parts or {}))
        evaluation.versions += (min_version, max_version)
        if kept_group and lease.prompt_id < evaluation.first_id + num_kept:
            max_bytes = self.config.capacity_bytes // KEPT_EVALUATION_SHARE
            evaluation.keep(lease.prompt_id, kept_group, prompt, max_bytes, self.store.clock() + KEPT_EVALUATION_S)
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
            if verdict == "abandoned":
                self.store.abandon_evaluation(evaluation_id)
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

    async def rewind_step(self, step: int, num_trained: int) -> dict[int, list[int]]:
        self._check_term()
        per_step = self.config.groups_per_step
        later = [len(ids) for of_step, ids in self.store.manifests.items() if of_step > step]
        self.store.counters["step"] = step
        self.store.counters["admission_base"] = (
            num_trained - step * per_step + sum(max(0, num_groups - per_step) for num_groups in later)
        )
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
        return KeptGroups(tuple(sorted(found.kept)), found.num_omitted)

    async def fetch_kept(self, evaluation_id: str, prompt_ids: Sequence[int], kind: str = "") -> list[bytes]:
        kept = self.store.evaluations[evaluation_id].kept
        return [kept[prompt_id][kind] for prompt_id in prompt_ids if prompt_id in kept]

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
            ids = store.ready_by_version.highest(max_groups)
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
        step, kept_after, last_id = (
            store.counters[name] for name in ("committed_step", "kept_after", "next_prompt_id")
        )
        return Committed(step, bytes(trained), kept_after, store.rewind, last_id)

    async def rewind(self, checkpoint: str, step: int, prompt_ids: Sequence[int]) -> None:
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
        store.rewind = RunRewind(checkpoint, self.term, 0)
        store.lease_signal.send()

    async def expire(self, prompt_id: int, reason: DropReason = "stale") -> None:
        self._check_term()
        if self._drop(prompt_id) is not None:
            self.store.prompts[prompt_id].attempt += 1
            self.store.count("expired")
            self.store.expired_reasons[reason_label(reason)] += 1
            self.store.make_pending(prompt_id)

    async def discard(self, prompt_id: int, reason: DropReason) -> None:
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
            self.store.dead_letter(prompt_id, reason, group.payload)

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


class MemoryReplayQueue(MemoryIntake, MemoryProducer, MemoryConsumer):
    """PromptIntake, GroupProducer and GroupConsumer over a store. `term` is 0 until `take_term` was called."""

    def __init__(self, store: MemoryStore, config: ReplayConfig) -> None:
        MemoryIntake.__init__(self, store, config)
        MemoryProducer.__init__(self, store, config)
        MemoryConsumer.__init__(self, store, config)
