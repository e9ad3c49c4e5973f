"""The contract of the replay queue, split by who may call what.

A prompt is in exactly one of these places at any time:

    pending ──lease──► leased ──append──► ready ──take──► delivered ──commit──► trained
       ▲                 │                  └──────┬──────────┤
       └── give back, ───┘                         │          └─ dead_letter ─► dead letters
           lease expiry                            ├─ expire (the prompt is pending again)
                                                   └─ discard (the prompt ends without being trained)

    trained ──go_back──► pending           the learner went back to a checkpoint from before the prompt was trained

    lease, append, give_back, heartbeat,           rollout servers
    save_tokens, saved_tokens, forget_tokens
    take, commit, expire, discard, dead_letter,    the learner that holds the current term
    go_back
    submit, feed                                   the gateway and the feed of a dataset

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

from collections.abc import Mapping, Sequence
from typing import Protocol

from penstock.replay.queue_types import (
    AppendOutcome,
    Committed,
    Delivery,
    Evaluation,
    FeedPosition,
    FinishedGroup,
    KeptGroups,
    Lease,
    Outbox,
    PromptStatus,
    QueueStat,
    SavedTokens,
    Submission,
)


class PromptIntake(Protocol):
    """The calls of the gateway and of the feed."""

    async def submit(self, payloads: Sequence[bytes], priorities: Sequence[int], idempotency_key: str) -> Submission:
        """Accept all prompts or none. They are as durable as Redis is when the call returns."""
        ...

    async def feed(
        self, name: str, fingerprint: str, position: int, payloads: Sequence[bytes], priorities: Sequence[int],
        epoch_prompts: int = 0,
    ) -> FeedPosition:  # fmt: skip
        """Submit the prompts at `position` of a dataset if exactly the prompts before it have been submitted. So every
        prompt is submitted once, whichever feeder is killed. Otherwise, and without prompts, no position changes.
        `epoch_prompts` is stored if it is given and the fingerprint is right. Returns the position after the call."""
        ...

    async def feeds(self) -> dict[str, FeedPosition]:
        """How far each dataset has been submitted, by name."""
        ...

    async def create_evaluation(self, evaluation_id: str, payloads: Sequence[bytes]) -> Evaluation:
        """Queue held-out prompts. Repeating an id changes nothing and returns the first one."""
        ...

    async def get_evaluation(self, evaluation_id: str) -> Evaluation: ...

    async def record_scores(self, number: int, scores: Mapping[str, float]) -> None:
        """Keep scores by the name of their benchmark, with a number such as the step of a validation, beside those of
        finished evaluations."""
        ...

    async def get_prompt(self, prompt_id: int) -> PromptStatus: ...

    async def get_group(self, prompt_id: int) -> bytes: ...

    async def stat(self) -> QueueStat: ...

    async def dead_letter_reasons(self) -> dict[str, int]:
        """Number of dead-lettered prompts by the first word of the reason."""
        ...

    async def evaluation_scores(self) -> dict[str, float]:
        """Newest score of each benchmark. A benchmark is the name of a finished evaluation without the number at its
        end."""
        ...

    async def evaluation_history(self) -> dict[str, float]:
        """Score of each finished evaluation whose name ends in a number, such as the step of a validation. The first
        MAX_SCORES are kept."""
        ...

    async def expired_reasons(self) -> dict[str, int]:
        """Number of expired (`stale`, `quarantined`, `reward_failed`, or `abandoned` by `go_back`) and discarded groups
        by the reason's first word."""
        ...


class GroupProducer(Protocol):
    """The calls of a rollout server."""

    async def lease(self, server_id: str, max_prompts: int) -> list[Lease]:
        """Lease up to `max_prompts`, as far as admission and the byte limit allow, in one atomic call.

        Training prompts are leased while `trained + queued + in_flight < (max_staleness + step + 1) · groups_per_step`
        and while ready groups have fewer than `capacity_bytes`. Prompts whose lease ran out are leased again before new
        ones. They are admitted already, so neither bound applies to them."""
        ...

    async def wait_for_prompts(self, timeout_s: float) -> None:
        """Wait until there are new prompts or there is room to admit some, or for `timeout_s`.

        It may return early. `lease` may also succeed without a signal, because a lease has run out or a pause has
        ended. So call `lease` after it in any case."""
        ...

    async def heartbeat(self, server_id: str, leases: Sequence[Lease]) -> list[int]:
        """Renew the leases. Returns the prompt ids whose lease this server no longer holds."""
        ...

    async def append(self, lease: Lease, payload: bytes, min_version: int) -> AppendOutcome:
        """Append a finished group. The first group of a prompt is accepted, and every later one is a `duplicate`, so
        the call can be repeated.

        `full` means that the queue is at `capacity_bytes`: try again later. A queue from which nothing can be taken is
        never full for the group that unblocks it. Raises QueueFull if the store itself is out of memory."""
        ...

    async def append_many(self, groups: Sequence[FinishedGroup]) -> list[AppendOutcome]:
        """`append` for each group in turn, in few exchanges with the store. Outcomes are in the same order."""
        ...

    async def record_evaluation(
        self, evaluation_id: str, lease: Lease, rewards: Sequence[float], min_version: int, max_version: int,
        data_source: str = "", answers: Sequence[str] = (), kept_group: bytes = b"", accuracies: Sequence[float] = (),
    ) -> None:  # fmt: skip
        """Record the samples of a held-out prompt. `answers` has the answer of each sample, or nothing if the reward
        does not say them, and `accuracies` the part `acc` of each reward, or nothing. `kept_group` is the encoded group
        if the learner's reward model is to score it; it is kept for KEPT_EVALUATION_S, if there is room."""
        ...

    async def save_tokens(self, server_id: str, pieces: Sequence[tuple[Lease, SavedTokens]]) -> list[int]:
        """Save tokens of unfinished groups. A piece with the sample and start of an earlier one replaces it.

        Returns the prompts of the pieces that were refused, because the lease is lost, the server is in quarantine, or
        there is no room. What was saved before stays. Raises QueueFull if the store is out of memory."""
        ...

    async def saved_tokens(self, lease: Lease) -> list[SavedTokens]:
        """The saved tokens of a leased prompt, by sample and start. Pieces may be missing, and may overlap."""
        ...

    async def forget_tokens(self, server_id: str, lease: Lease) -> None:
        """Delete the saved tokens of a prompt, if the server still has its lease."""
        ...

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
        ...

    async def reconcile(self, held: Sequence[Lease]) -> Outbox:
        """Compare the groups in the producer's outbox with the queue."""
        ...


class GroupConsumer(Protocol):
    """The calls of the learner. All but `store_id`, `take_term`, `committed`, `feeds`, those of evaluations,
    `expired_reasons`, `wait_for_groups`, `fetch`, `prompts` and `stat` raise Fenced once a newer term was taken."""

    async def store_id(self) -> str:
        """Random name of the store that holds this run's queue, made at the first call. A store that lost everything,
        or another store, has another name."""
        ...

    async def take_term(self, at_least: int) -> int:
        """Become the only learner: returns a term above every earlier one and above `at_least`."""
        ...

    async def restore(self, step: int) -> dict[int, list[int]]:
        """Start from a checkpoint of `step`. Returns the manifests that the queue holds, by step.

        The groups of later steps are delivered again, in the same batches."""
        ...

    async def evaluation_history(self) -> dict[str, float]:
        """As in PromptIntake."""
        ...

    async def record_scores(self, number: int, scores: Mapping[str, float]) -> None:
        """As in PromptIntake."""
        ...

    async def kept_groups(self, evaluation_id: str) -> KeptGroups:
        """The groups of an evaluation that are still kept. None of them if all were forgotten, or none was kept."""
        ...

    async def fetch_kept(self, evaluation_id: str, prompt_ids: Sequence[int]) -> list[bytes]:
        """Kept groups of an evaluation. Those that are no longer kept are left out."""
        ...

    async def forget_kept(self, evaluation_id: str) -> None:
        """Delete the kept groups of an evaluation."""
        ...

    async def expired_reasons(self) -> dict[str, int]:
        """As in PromptIntake."""
        ...

    async def feeds(self) -> dict[str, FeedPosition]:
        """As in PromptIntake."""
        ...

    async def finish(self, step: int) -> None:
        """Record that no step follows this one: the run has made its last step, or its data has ended."""
        ...

    async def take(self, step: int, max_groups: int) -> list[int]:
        """Move ready groups into the manifest of `step` and return their prompt ids, in the configured order.

        Under `wait` no group is taken that was admitted after a prompt still in flight. If the manifest holds groups
        that neither `restore` nor an earlier take has returned, because an answer was lost, only these are returned."""
        ...

    async def wait_for_groups(self, timeout_s: float) -> None:
        """Wait until new groups may be taken, or for `timeout_s`. It may return early."""
        ...

    async def fetch(self, prompt_ids: Sequence[int]) -> list[Delivery]:
        """The groups of these prompts. Those that are no longer queued are left out."""
        ...

    async def prompts(self, prompt_ids: Sequence[int]) -> list[bytes]:
        """The encoded prompts, in the same order; empty for a prompt that is trained, dead-lettered or unknown."""
        ...

    async def commit(self, step: int, prompt_ids: Sequence[int], oldest_step: int = 0) -> int:
        """Acknowledge and delete groups that a durable checkpoint covers. Returns how many were still there.

        Closes the manifests up to `step`. Other groups in them become ready again. The prompts are kept for `go_back`
        until `oldest_step`, the step of the oldest checkpoint that exists, has reached the step of their commit."""
        ...

    async def committed(self) -> Committed:
        """What commits have covered so far."""
        ...

    async def go_back(self, checkpoint: str, step: int, prompt_ids: Sequence[int]) -> None:
        """Undo the commits of these prompts, in one atomic call: the run continues from a checkpoint of `step`, whose
        weights were not trained on them. `checkpoint` is its path.

        The prompts are pending again, and their groups count as expired. Groups that were taken for later steps are
        ready again. Raises Conflict, and changes nothing, if a prompt is no longer kept."""
        ...

    async def expire(self, prompt_id: int, reason: str = "stale") -> None:
        """Drop a group that must not be trained and admit its prompt again. The prompt loses no attempt."""
        ...

    async def discard(self, prompt_id: int, reason: str) -> None:
        """Drop a group that is not worth training and forget its prompt. Another prompt may be admitted instead."""
        ...

    async def dead_letter(self, prompt_id: int, reason: str) -> None: ...

    async def publish(self, policy_version: int, step: int, policy: bytes) -> None:
        """Make `policy_version` the run's current version, which opens admission for the next step.

        `policy` is the version's encoded registry record."""
        ...

    async def allocate_version(self, at_least: int) -> int:
        """A policy version that this run has never used."""
        ...

    async def stat(self) -> QueueStat: ...
