"""The replay queue on Redis (6.2 or newer), split by who may call what.

Every transition is one Lua script in `lua/`, so it happens whole or not at all. group_payloads.py moves the bytes.

A prompt is in exactly one of these places at any time:

    pending ──lease──► leased ──append──► ready ──take──► delivered ──commit──► trained
       ▲                 │                  └──────┬──────────┤
       └── give back, ───┘                         │          └─ dead_letter ─► dead letters
           lease expiry                            ├─ expire (the prompt is pending again)
                                                   └─ discard (the prompt ends without being trained)

    trained ──rewind──► pending            the learner rewound to a checkpoint from before the prompt was trained

    lease, append, give_back, heartbeat,           rollout servers
    save_tokens, saved_tokens, forget_tokens
    take, commit, expire, discard, dead_letter,    the learner that holds the current term
    rewind
    submit, feed                                   the gateway and the feed of a dataset
    accept                                         sessions and imports, whose groups need no rollout server

`admitted` counts first leases, and leases after an expiry. A prompt whose lease was lost is still in flight. So
`admitted = trained + expired + dead_lettered + queued + in_flight` holds at every moment (queued = ready + delivered;
expired includes discarded).

Every admission has a number. Ready groups are taken in the order of these numbers (`fifo`) or newest version first
(`freshest`). `replay.stale_policy` says what happens to a group that would be trained past the staleness bound:

    wait      take stops before a prompt that is still in flight, so groups are trained exactly in order of admission.
              Admission alone then keeps the bound: the k-th admission that is not dropped is trained in step
              k / groups_per_step, at most max_staleness steps after the step it was admitted in. A straggler stalls
              training until its lease is reclaimed or it is dead-lettered.
    drop      take skips stragglers. The learner expires a group that arrives too old, and its prompt is admitted again.
    correct   take skips stragglers. The learner trains a group that is too old with off-policy weights.

While a prompt is leased, its server may save the tokens that its samples have so far. They stay while the prompt is in
flight, so the next lease continues the samples. They are deleted with the transition that ends the flight. They are
not a place of the diagram: no count of groups contains them, and losing them costs no more than generating them again.

Evaluation prompts take a separate lane: they are leased without admission, recorded in their evaluation, and never
queued.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from penstock.codec import encode_group
from penstock.config.service import ReplayConfig
from penstock.errors import Conflict, DeadlineExceeded, NotFound
from penstock.replay.group_payloads import GroupPayloads
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
    PromptRequest,
    PromptStatus,
    QueueStat,
    RunRewind,
    SavedTokens,
    Submission,
    admission,
)
from penstock.sample_scores import Parts, PromptSamples, by_source, part_means, scores_by_source, summarise
from penstock.store.ownership import RUN_ITSELF, Owner
from penstock.store.redis_client import QUEUE, RedisClient, RunRecords, guarded, read_columns, read_record, read_rows

T = TypeVar("T")
IDEMPOTENCY_TTL_S = 7 * 24 * 3600
DURABLE_MARGIN_S = 10.0
"""Extra time for new ids to become durable, beyond twice the loss window."""
PROMPTS_AT_ONCE = 64
"""Prompts that one command reads. A prompt may be large, and Redis answers no one else meanwhile."""


class QueueCalls(RunRecords):
    """What all three sides share: the client, the Lua scripts, waiting, the bytes of queued groups, and the counts."""

    scripts = QUEUE

    def __init__(self, client: RedisClient, run: str, config: ReplayConfig) -> None:
        super().__init__(client, run)
        self.config = config
        self.payloads = GroupPayloads(client, self.keys)
        self._seen: dict[str, bytes] = {}
        """Newest entry of each stream that a wait has seen. The next wait returns at once if there are newer ones, so
        no signal between two waits is missed."""

    async def fetch_located(self, prompt_ids: Sequence[int]) -> dict[int, bytes]:
        """The groups of these prompts that are queued, wherever they are."""
        located = await self.call("locate", *prompt_ids)
        return await self.payloads.fetch(
            {prompt_id: key for prompt_id, key in zip(prompt_ids, located, strict=True) if key}
        )

    async def wait_for_entry(self, stream: str, timeout_s: float) -> None:
        """Block on a separate connection until the stream has an entry that no wait has seen, or for `timeout_s`."""
        block_ms = max(1, int(1000 * min(timeout_s, self.client.max_block_s)))
        found = await guarded(self.client.xread({stream: self._seen.get(stream, b"0-0")}, count=1, block=block_ms))
        if found and stream == self.keys.lease_signals:  # it has one entry, so that is the newest
            self._seen[stream] = found[0][1][0][0]
        elif found:
            for entry_id, _ in await guarded(self.client.xrevrange(stream, count=1)):
                self._seen[stream] = entry_id

    async def feeds(self) -> dict[str, FeedPosition]:
        """How far each dataset has been submitted, by name."""
        fields = await self.hash_of(self.keys.feeds)
        return {
            name: FeedPosition(
                int(position), fields.get(f"{name}:fingerprint", b"").decode(), int(fields.get(f"{name}:prompts", 0))
            )
            for name, position in fields.items()
            if ":" not in name
        }

    async def record_scores(
        self, number: int, scores: Mapping[str, float], details: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Keep scores by benchmark, with a number such as the step of a validation, like finished evaluations. Details
        are kept likewise while there is room that no score needs."""
        flat = [item for name, value in (*scores.items(), *details.items()) for item in (name, repr(value))]
        await self.call("record_scores", number, len(scores), *flat)

    async def evaluation_history(self) -> dict[str, float]:
        """Score of each finished evaluation whose name ends in a number. The first ones are kept: see keep_score."""
        return {name: float(score) for name, score in (await self.hash_of(self.keys.score_history)).items()}

    async def expired_reasons(self) -> dict[str, int]:
        """Number of expired and discarded groups by the first word of the reason, such as `stale` or `abandoned`."""
        return await self._reasons(self.keys.expired_reasons)

    async def stat(self) -> QueueStat:
        numbers = read_record(await self.call("stat"))
        state = admission(
            step=numbers["step"], trained=numbers["trained"], queued=numbers["queued"], in_flight=numbers["in_flight"],
            max_staleness=self.config.max_staleness, groups_per_step=self.config.groups_per_step,
            base=numbers.pop("admission_base"),
        )  # fmt: skip
        return QueueStat(**numbers, admission_limit=state.limit, admission_room=state.room)

    async def _reasons(self, key: str) -> dict[str, int]:
        return {reason: int(count) for reason, count in (await self.hash_of(key)).items()}


class PromptIntake(QueueCalls):
    """The calls of the gateway and of the feed."""

    async def submit(self, payloads: Sequence[bytes], priorities: Sequence[int], idempotency_key: str) -> Submission:
        """Accept all prompts or none. They are as durable as Redis is when the call returns."""
        return (await self.submit_many([PromptRequest(payloads, priorities, idempotency_key)]))[0]

    async def submit_many(self, requests: Sequence[PromptRequest], *, all_or_none: bool = False) -> list[Submission]:
        """`submit` for many requests in one exchange. The answer to a request whose key its owner has used for other
        prompts is replayed and has no ids. With `all_or_none`, nothing is submitted if there is such a request; then
        new ones have no ids either."""
        flat: list[Any] = []
        for request in requests:
            key = request.idempotency_key
            flat += (key, request.owner, request.digest, len(request.payloads)) if key else ("", len(request.payloads))
            flat += [item for pair in zip(request.payloads, request.priorities, strict=True) for item in pair]
        return [
            Submission(tuple(range(row["first_id"], row["first_id"] + row["count"])), bool(row["replayed"]))
            for row in read_rows(await self.call("submit", IDEMPOTENCY_TTL_S, int(all_or_none), *flat))
        ]

    async def feed(
        self, name: str, fingerprint: str, position: int, payloads: Sequence[bytes], priorities: Sequence[int],
        epoch_prompts: int = 0, owner: str = "",
    ) -> FeedPosition:  # fmt: skip
        """Submit the prompts at `position` of a dataset if exactly the prompts before it have been submitted. So every
        prompt is submitted once, whichever feeder is killed. Otherwise, and without prompts, no position changes.
        `epoch_prompts` is stored if it is given and the fingerprint is right, and `owner` if it is given and there is
        none yet. Returns the position after the call."""
        flat = [item for pair in zip(payloads, priorities, strict=True) for item in pair]
        feed = read_record(await self.call("feed", name, fingerprint, position, epoch_prompts, owner, *flat))
        fingerprint, owner = feed["fingerprint"].decode(), feed["owner"].decode()
        return FeedPosition(feed["position"], fingerprint, feed["epoch_prompts"], feed["last_id"], owner)

    async def create_evaluation(
        self, evaluation_id: str, payloads: Sequence[bytes], owner: Owner = RUN_ITSELF, digest: str = ""
    ) -> Evaluation:
        """Queue held-out prompts. Repeating an id with the same digest changes nothing and returns the first one, if it
        may be used."""
        is_other = await self.call("create_evaluation", evaluation_id, *owner.arguments, digest, *payloads) < 0
        try:
            evaluation = await self.get_evaluation(evaluation_id, owner)
        except NotFound as error:
            raise Conflict(f"evaluation {evaluation_id!r} is another key's; choose another id") from error
        if is_other:
            raise Conflict(f"evaluation {evaluation_id!r} has other prompts; choose another id")
        return evaluation

    async def get_evaluation(self, evaluation_id: str, owner: Owner = RUN_ITSELF, part: str = "") -> Evaluation:
        """`part` is the part of the reward that pass@k counts; empty: the reward."""
        fields = await guarded(self.client.hgetall(self.keys.evaluation(evaluation_id)))
        if not fields or not owner.may_use(fields.get(b"owner", b"").decode()):
            raise NotFound(f"evaluation {evaluation_id!r} does not exist")
        num_samples = int(fields[b"num_samples"])
        samples = []
        for prompt in [name.partition(b":")[2] for name in fields if name.startswith(b"rewards:")]:
            rewards = tuple(map(float, fields[b"rewards:" + prompt].split()))
            source, answers, *_ = json.loads(fields.get(b"samples:" + prompt, b'["", []]'))
            parts = json.loads(fields.get(b"parts:" + prompt, b"{}"))
            samples.append(PromptSamples(source, rewards, tuple(answers), parts))
        return Evaluation(
            evaluation_id=evaluation_id,
            num_prompts=int(fields[b"num_prompts"]),
            num_finished=int(fields[b"num_finished"]),
            score=float(fields[b"reward_sum"]) / num_samples if num_samples else 0.0,
            policy_version_min=int(fields.get(b"version_min", -1)),
            policy_version_max=int(fields.get(b"version_max", -1)),
            num_samples=num_samples,
            pass_at=summarise(samples, part=part).pass_at,
            num_failed=int(fields.get(b"num_failed", 0)),
            by_source=scores_by_source(samples),
            parts={source: found for source, own in by_source(samples).items() if (found := part_means(own))},
        )

    async def evaluation_progress(self, evaluation_id: str) -> tuple[int, int] | None:
        """The numbers of finished and of all prompts; None if there is no such evaluation."""
        names = ["num_finished", "num_prompts"]
        num_finished, num_prompts = await guarded(self.client.hmget(self.keys.evaluation(evaluation_id), names))
        return None if num_prompts is None else (int(num_finished), int(num_prompts))

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

    async def dead_letter_reasons(self) -> dict[str, int]:
        """Number of dead-lettered prompts by the first word of the reason."""
        return await self._reasons(self.keys.dead_reasons)

    async def evaluation_scores(self) -> dict[str, float]:
        """Newest score of each benchmark, which is the name of a finished evaluation without the number at its end."""
        return {name: float(score) for name, score in (await self.hash_of(self.keys.scores)).items()}


class GroupProducer(QueueCalls):
    """The calls of a rollout server."""

    async def lease(self, server_id: str, max_prompts: int) -> list[Lease]:
        """Lease up to `max_prompts`, as far as admission and the byte limit allow, in one atomic call.

        Training prompts are leased while `trained + queued + in_flight` is below the limit of `queue_types.admission`
        and while ready groups have fewer than `capacity_bytes`. Prompts whose lease ran out are leased again before new
        ones. They are admitted already, so neither bound applies to them."""
        config = self.config
        leased = read_columns(await self.call(
            "lease", server_id, max_prompts, self._lease_ttl_ms, config.groups_per_step, config.max_staleness,
            config.capacity_bytes, config.max_attempts, int(config.loss_window_s * 1000),
            int(config.breaker.probe_s * 1000) if config.breaker.failures else 0,
        ))  # fmt: skip
        return [Lease(*row) for row in zip(leased["prompt_id"], leased["attempt"], leased["payload"], strict=True)]

    async def wait_for_prompts(self, timeout_s: float) -> None:
        """Wait until there are new prompts or there is room to admit some, or for `timeout_s`.

        It may return early. `lease` may also succeed without a signal, because a lease has run out or a pause has
        ended. So call `lease` after it in any case."""
        await self.wait_for_entry(self.keys.lease_signals, timeout_s)

    async def heartbeat(self, server_id: str, leases: Sequence[Lease]) -> list[int]:
        """Renew the leases. Returns the prompt ids whose lease this server no longer holds."""
        if not leases:
            return []
        lost: list[int] = await self.call("heartbeat", server_id, self._lease_ttl_ms, *_pairs(leases))
        return lost

    async def append(self, lease: Lease, payload: bytes, min_version: int) -> AppendOutcome:
        """Append a finished group. The first group of a prompt is accepted, and every later one is a `duplicate`, so
        the call can be repeated.

        `full` means that the queue is at `capacity_bytes`: try again later. A queue from which nothing can be taken is
        never full for the group that unblocks it. Raises QueueFull if the store itself is out of memory."""
        return (await self.append_many([FinishedGroup(lease, payload, min_version)]))[0]

    async def append_many(self, groups: Sequence[FinishedGroup]) -> list[AppendOutcome]:
        """`append` for each group in turn, in few exchanges with the store. Outcomes are in the same order."""
        return await self.payloads.append(groups, self.config)

    async def accept(self, groups: Sequence[OfferedGroup], origin: Origin) -> list[tuple[int, AppendOutcome]]:
        """Queue groups that no rollout server has leased: submit and lease their prompts without asking for admission,
        because the groups exist already, then append them in order until one is refused as `full`. Returns the prompt
        id and the outcome of each.

        The call can be repeated at any point, by anyone: a group that an earlier call brought is a `duplicate`. Waits
        until Redis can no longer lose the prompt ids, as every lease does."""
        leases = await self._lease_offered(groups, origin)
        outcomes: list[AppendOutcome] = []
        for lease, offered in zip(leases, groups, strict=True):
            if "full" in outcomes[-1:]:
                outcomes.append("full")
            elif not lease.attempt:
                outcomes.append("duplicate")
            else:
                made = replace(offered.group, run=self.run, prompt_id=lease.prompt_id, attempt=lease.attempt)
                payload = await asyncio.to_thread(encode_group, made)
                outcomes.append(await self.append(lease, payload, made.min_version))
        return [(lease.prompt_id, outcome) for lease, outcome in zip(leases, outcomes, strict=True)]

    async def _lease_offered(self, groups: Sequence[OfferedGroup], origin: Origin) -> list[Lease]:
        """The leases of the groups. The attempt of a group that an earlier call brought is 0."""
        flat = [item for offered in groups for item in (offered.number, offered.prompt, offered.priority)]
        loss_window_s = self.config.loss_window_s
        deadline = time.monotonic() + 2 * loss_window_s + DURABLE_MARGIN_S  # ids that are older become durable first
        times_ms = self._lease_ttl_ms, int(loss_window_s * 1000)
        while groups:
            leased = read_rows(await self.call("accept", origin.key, IDEMPOTENCY_TTL_S, origin.name, *times_ms, *flat))
            if leases := [Lease(**row, payload=b"") for row in leased]:
                return leases
            if time.monotonic() > deadline:
                raise DeadlineExceeded("new prompt ids do not become durable; is Redis restarting? Try again")
            await asyncio.sleep(loss_window_s / 10)
        return []

    async def record_evaluation(
        self, evaluation_id: str, lease: Lease, rewards: Sequence[float], min_version: int, max_version: int,
        data_source: str = "", answers: Sequence[str] = (), kept_group: bytes = b"", parts: Parts | None = None,
        num_kept: int = ALL_PROMPTS,
    ) -> None:  # fmt: skip
        """Record the samples of a held-out prompt. `answers` has the answer of each sample, or nothing if the reward
        does not say them. `kept_group` is the encoded group if the learner is to read it. It is kept with its prompt
        for KEPT_EVALUATION_S, if there is room and the prompt is among the first `num_kept` of the evaluation."""
        await self.call(
            "record_evaluation", evaluation_id, lease.prompt_id, len(rewards), sum(rewards), min_version, max_version,
            " ".join(map(repr, rewards)), json.dumps([data_source, list(answers)]), kept_group,
            self.config.capacity_bytes // KEPT_EVALUATION_SHARE, KEPT_EVALUATION_S, json.dumps(parts or {}), num_kept,
        )  # fmt: skip

    async def save_tokens(self, server_id: str, pieces: Sequence[tuple[Lease, SavedTokens]]) -> list[int]:
        """Save tokens of unfinished groups. A piece with the sample and start of an earlier one replaces it.

        Returns the prompts of the pieces that were refused, because the lease is lost, the server is in quarantine, or
        there is no room. What was saved before stays. Raises QueueFull if the store is out of memory."""
        if not pieces:
            return []
        flat: list[Any] = []
        for lease, piece in pieces:
            flat += (lease.prompt_id, lease.attempt, piece.sample, piece.start, piece.payload)
        max_bytes = self.config.capacity_bytes // SAVED_SHARE
        refused: list[int] = await self.call("save_tokens", server_id, max_bytes, *flat)
        return refused

    async def saved_tokens(self, lease: Lease) -> list[SavedTokens]:
        """The saved tokens of a leased prompt, by sample and start. Pieces may be missing, and may overlap."""
        pieces = []
        for value in filter(None, await guarded(self.client.hvals(self.keys.saved(lease.prompt_id)))):
            sample, start, payload = value.split(b":", 2)
            pieces.append(SavedTokens(int(sample), int(start), payload))
        return sorted(pieces, key=lambda piece: (piece.sample, piece.start))

    async def forget_tokens(self, server_id: str, lease: Lease) -> None:
        """Delete the saved tokens of a prompt, if the server still has its lease."""
        await self.call("forget_tokens", server_id, lease.prompt_id, lease.attempt)

    async def give_back(
        self, server_id: str, lease: Lease, failure: str = "", *, is_final: bool = False, num_running: int = 0,
        forget_saved: bool = False,
    ) -> bool:  # fmt: skip
        """Return a prompt to the queue. Its saved tokens stay for the next lease, unless `forget_saved`.

        A `failure` counts towards max_attempts, as soon as it is known that the server
        was not at fault. At max_attempts, or at once if the failure `is_final`, the prompt is dead-lettered; a held-out
        prompt counts as finished, without samples.

        Returns whether the failure opened the server's breaker, which pauses its leasing: see lua/prelude_breaker.lua.
        `num_running` is the number of other prompts that the server works on."""
        max_attempts, breaker = 1 if is_final else self.config.max_attempts, self.config.breaker
        return bool(await self.call(
            "give_back", server_id, lease.prompt_id, lease.attempt, failure, max_attempts, int(is_final), num_running,
            breaker.failures, breaker.non_finite_failures, int(breaker.probe_s * 1000), int(forget_saved),
        ))  # fmt: skip

    async def reconcile(self, held: Sequence[Lease]) -> Outbox:
        """Compare the groups in the producer's outbox with the queue."""
        if not held:
            return Outbox((), ())
        answer = read_record(await self.call("reconcile", *_pairs(held)))
        return Outbox(tuple(answer["done"]), tuple(answer["missing"]))

    @property
    def _lease_ttl_ms(self) -> int:
        return int(self.config.lease_ttl_s * 1000)


class GroupConsumer(QueueCalls):
    """The calls of the learner. All but `store_id`, `take_term`, `committed`, `feeds`, those of evaluations,
    `expired_reasons`, `wait_for_groups`, `fetch`, `prompts` and `stat` raise Fenced once a newer term was taken.

    `term` is 0 until `take_term` was called."""

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
        """Random name of the store that holds this run's queue, made at the first call. A store that lost everything,
        or another store, has another name."""
        name: bytes = await self.call("store_id", secrets.token_hex(8))
        return name.decode()

    async def take_term(self, at_least: int) -> int:
        """Become the only learner: returns a term above every earlier one and above `at_least`."""
        self.term = await self.call("take_term", at_least)
        return self.term

    async def rewind_step(self, step: int, num_trained: int) -> dict[int, list[int]]:
        """Start from a checkpoint of `step`, at which `num_trained` groups were trained. Admission counts from there,
        so it keeps the bound on staleness if `groups_per_step` has changed. Returns the manifests that the queue holds,
        by step. The groups of later steps are delivered again, in the same batches."""
        flat = await self.call("rewind_step", self.term, step, num_trained, self.config.groups_per_step)
        manifests = {int(flat[i]): [int(word) for word in flat[i + 1].split()] for i in range(0, len(flat), 2)}
        self._manifests = {of_step: list(ids) for of_step, ids in manifests.items()}
        return manifests

    async def kept_groups(self, evaluation_id: str) -> KeptGroups:
        """The groups of an evaluation that are still kept. None of them if all were forgotten, or none was kept."""
        names = await guarded(self.client.hkeys(self.keys.evaluation_groups(evaluation_id)))
        num_omitted = await guarded(self.client.hget(self.keys.evaluation(evaluation_id), "num_omitted"))
        return KeptGroups(tuple(sorted(int(name) for name in names if name.isdigit())), int(num_omitted or 0))

    async def fetch_kept(self, evaluation_id: str, prompt_ids: Sequence[int], kind: str = "") -> list[bytes]:
        """Kept groups of an evaluation, or with the kind `prompt:` their prompts. Others are skipped."""
        if not prompt_ids:
            return []
        names = [f"{kind}{prompt_id}" for prompt_id in prompt_ids]
        found = await guarded(self.client.hmget(self.keys.evaluation_groups(evaluation_id), names))
        return [each for each in found if each is not None]

    async def forget_kept(self, evaluation_id: str) -> None:
        await guarded(self.client.unlink(self.keys.evaluation_groups(evaluation_id)))

    async def finish(self, step: int) -> None:
        """Record that no step follows this one: the run has made its last step, or its data has ended."""
        await self.call("finish", self.term, step)

    async def take(self, step: int, max_groups: int) -> list[int]:
        """Move ready groups into the manifest of `step` and return their prompt ids, in the configured order.

        Under `wait` no group is taken that was admitted after a prompt still in flight. If the manifest holds groups
        that neither `rewind_step` nor an earlier take has returned, since an answer was lost, it returns only these."""
        known = self._manifests.setdefault(step, [])
        limits = (max_groups, self.config.take_order, self.config.capacity_bytes)
        taken, self._fetched_ahead = await self.payloads.take(self.term, step, *limits, *known)
        self._attempts |= taken
        known += taken
        return list(taken)

    async def wait_for_groups(self, timeout_s: float) -> None:
        """Wait until new groups may be taken, or for `timeout_s`. It may return early.

        Every change that lets a group be taken adds an entry to the results: append, dead letter, cancellation."""
        await self.wait_for_entry(self.keys.results, timeout_s)

    async def fetch(self, prompt_ids: Sequence[int]) -> list[Delivery]:
        """The groups of these prompts. Prompts that are no longer queued are skipped."""
        known, ahead = self._attempts, self._fetched_ahead
        attempts = {prompt_id: known.pop(prompt_id) for prompt_id in prompt_ids if prompt_id in known}
        payloads = {prompt_id: ahead.pop(prompt_id) for prompt_id in attempts if prompt_id in ahead}
        if len(payloads) < len(attempts):
            others = {prompt_id: attempt for prompt_id, attempt in attempts.items() if prompt_id not in payloads}
            payloads |= await self.payloads.fetch(self.payloads.keys_of(others))
        # A learner before this one took these groups, or their attempt has changed.
        unknown = [prompt_id for prompt_id in prompt_ids if prompt_id not in payloads]
        if unknown:
            payloads |= await self.fetch_located(unknown)
        return [Delivery(prompt_id, payloads[prompt_id]) for prompt_id in prompt_ids if prompt_id in payloads]

    async def prompts(self, prompt_ids: Sequence[int]) -> list[bytes]:
        """The encoded prompts, in the same order; empty for a prompt that is trained, dead-lettered or unknown."""
        payloads: list[bytes] = []
        for first in range(0, len(prompt_ids), PROMPTS_AT_ONCE):
            some = prompt_ids[first : first + PROMPTS_AT_ONCE]
            payloads += [found or b"" for found in await guarded(self.client.hmget(self.keys.prompts, some))]
        return payloads

    async def commit(self, step: int, prompt_ids: Sequence[int], oldest_step: int = 0) -> int:
        """Acknowledge and delete groups that a durable checkpoint covers. Returns how many were still there.

        Closes the manifests up to `step`. Other groups in them become ready again. The prompts are kept for `rewind`
        until `oldest_step`, the step of the oldest checkpoint that exists, has reached the step of their commit."""
        committed: int = await self.call("commit", self.term, step, oldest_step, " ".join(map(str, prompt_ids)))
        if self._fetched_ahead:
            self._forget_fetched(prompt_ids)
        self._manifests = {of_step: ids for of_step, ids in self._manifests.items() if of_step > step}
        return committed

    async def committed(self) -> Committed:
        trained = await guarded(self.client.get(self.keys.trained))
        fields = (
            "committed_step", "kept_after", "next_prompt_id", "rewind_term", "rewind_orders", "rewind_checkpoint",
        )  # fmt: skip
        *numbers, checkpoint = await guarded(self.client.hmget(self.keys.counters, fields))
        step, kept_after, last_id, term, num_orders = (int(number or 0) for number in numbers)
        rewind = RunRewind(checkpoint.decode(), term, num_orders) if checkpoint else None
        return Committed(step, (trained or b"").rstrip(b"\0"), kept_after, rewind, last_id)

    async def rewind(self, checkpoint: str, step: int, prompt_ids: Sequence[int]) -> None:
        """Undo the commits of these prompts, in one atomic call: the run continues from a checkpoint of `step`, whose
        weights were not trained on them. `checkpoint` is its path.

        The prompts are pending again, and their groups count as expired. Groups that were taken for later steps are
        ready again. Raises Conflict, and changes nothing, if a prompt is no longer kept."""
        num_missing: int = await self.call("rewind", self.term, checkpoint, step, *prompt_ids)
        if num_missing:
            raise Conflict(f"{num_missing} prompts that were trained after step {step} are no longer kept")
        self._manifests, self._attempts, self._fetched_ahead = {}, {}, {}

    async def expire(self, prompt_id: int, reason: DropReason = "stale") -> None:
        """Drop a group that must not be trained and admit its prompt again. The prompt loses no attempt."""
        await self._drop("expire", prompt_id, reason)

    async def discard(self, prompt_id: int, reason: DropReason) -> None:
        """Drop a group that is not worth training and forget its prompt. Another prompt may be admitted instead."""
        await self._drop("discard", prompt_id, reason)

    async def dead_letter(self, prompt_id: int, reason: str) -> None:
        await self._drop("dead_letter", prompt_id, reason)

    async def publish(self, policy_version: int, step: int, policy: bytes) -> None:
        """Make `policy_version` the run's current version, which opens admission for the next step.

        `policy` is the version's encoded registry record."""
        await self.call("publish", self.term, policy_version, step, policy)

    async def allocate_version(self, at_least: int) -> int:
        """A policy version that this run has never used."""
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


class RedisReplayQueue(PromptIntake, GroupProducer, GroupConsumer):
    """All calls of one run's queue. A process uses those of its own side."""


async def answer_all(waiting: Sequence[asyncio.Future[T]], exchange: Awaitable[Sequence[T | Exception]]) -> None:
    """Give each caller that still waits its answer, or its error, or the error with which the exchange failed."""
    try:
        answers = await exchange
    except Exception as error:
        for future in waiting:
            if not future.done():
                future.set_exception(error)
    else:
        for future, answer in zip(waiting, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)


def _pairs(leases: Sequence[Lease]) -> list[int]:
    return [number for lease in leases for number in (lease.prompt_id, lease.attempt)]
