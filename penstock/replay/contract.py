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
from dataclasses import dataclass, field
from typing import Literal, Protocol

PromptState = Literal["pending", "leased", "queued", "trained", "dead_lettered", "cancelled"]
AppendOutcome = Literal["accepted", "duplicate", "full", "unknown"]


@dataclass(frozen=True)
class Submission:
    """Answer to `submit`."""

    prompt_ids: tuple[int, ...]
    replayed: bool
    """Whether these are the ids of an earlier request with the same idempotency key."""
    num_replayed: int = 0
    """How many of the prompts were submitted before. The gateway fills it in."""


@dataclass(frozen=True)
class PromptStatus:
    """Where a prompt is."""

    prompt_id: int
    state: PromptState
    attempt: int
    payload: bytes
    """The encoded prompt; empty once it is trained or dead-lettered."""


@dataclass(frozen=True)
class Lease:
    """A prompt that a server may work on until the lease runs out. `attempt` counts the leases of the prompt."""

    prompt_id: int
    attempt: int
    payload: bytes


@dataclass(frozen=True)
class FinishedGroup:
    """An encoded group and the lease under which it was made."""

    lease: Lease
    payload: bytes
    min_version: int


@dataclass(frozen=True)
class SavedTokens:
    """Consecutive tokens of one sample, saved before its group was finished."""

    sample: int
    """Number of the sample in its group, from 0."""
    start: int
    """Index of the first of the tokens in the response."""
    payload: bytes
    """Encoded by the rollout server. The queue does not read it."""


SAVED_SHARE = 4
"""Saved tokens have at most `replay.capacity_bytes` divided by this."""


@dataclass(frozen=True)
class Evaluation:
    """Progress and scores of an evaluation."""

    evaluation_id: str
    num_prompts: int
    num_finished: int
    score: float
    policy_version_min: int
    policy_version_max: int
    num_samples: int = 0
    pass_at: dict[int, float] = field(default_factory=dict)
    """pass@k over the prompts finished so far: see `penstock.sample_scores`. A sample passes with a reward of 1."""
    num_failed: int = 0
    """Finished prompts that have no samples, because they failed too often or nobody could answer them. The score does
    not contain them."""
    by_source: dict[str, dict[str, float]] = field(default_factory=dict)
    """Scores of each data source: see `penstock.sample_scores.scores_by_source`."""


def is_numbered(evaluation_id: str) -> bool:
    """Whether the id ends in a number, such as the step of a validation. Scores of other evaluations have no history,
    and the learner does not see them."""
    benchmark, _, number = evaluation_id.rpartition("-")
    return benchmark != "" and number.isascii() and number.isdigit()


@dataclass(frozen=True)
class KeptGroups:
    """The groups of an evaluation that are kept for the learner's reward model."""

    prompt_ids: tuple[int, ...] = ()
    num_left_out: int = 0
    """Groups for which there was no room."""


KEPT_EVALUATION_S = 3600
"""How long the groups of an evaluation are kept after the last of them was recorded."""
KEPT_EVALUATION_SHARE = 4
"""The kept groups of one evaluation have at most `replay.capacity_bytes` divided by this."""


@dataclass(frozen=True)
class FeedPosition:
    """How far a dataset has been submitted."""

    position: int
    """Number of the next prompt, over all epochs."""
    fingerprint: str
    """Hash of the dataset's rows and their order."""
    epoch_prompts: int = 0
    """Number of prompts of one epoch; 0 if the feed has not said it."""
    last_id: int = field(default=0, compare=False)
    """In the answer to `feed`: the newest prompt id. If the call has submitted prompts, it is that of the last one."""

    def has_ended(self, epochs: int) -> bool:
        """Whether all prompts of so many epochs were submitted. 0 epochs have no end."""
        return 0 < epochs * self.epoch_prompts <= self.position


@dataclass(frozen=True)
class Outbox:
    """Which of a producer's accepted groups it may forget, and which it must append again."""

    done: tuple[int, ...]
    """Prompts whose group was committed, buried or superseded: forget them."""
    missing: tuple[int, ...]
    """Prompts whose group Redis lost with its tail: append it again."""


@dataclass(frozen=True)
class Delivery:
    """An encoded group that the learner has taken."""

    prompt_id: int
    payload: bytes


@dataclass(frozen=True)
class GoneBack:
    """The last time that the run went back to a checkpoint."""

    checkpoint: str
    """Path of the checkpoint."""
    term: int
    """The term that went back. Checkpoints of earlier terms that are newer than `checkpoint` are abandoned."""
    num_roll_backs: int
    """How many roll backs the operator had ordered by then."""


@dataclass(frozen=True)
class Committed:
    """What durable checkpoints cover, as far as the queue knows. A learner must start from a state that covers it."""

    step: int
    """Step of the newest commit."""
    trained: bytes
    """Bitmap of the committed prompts. The first byte's highest bit stands for prompt 0."""
    kept_after: int
    """The prompts of every commit after this step are kept, so the run can go back to this step, but no further."""
    gone_back: GoneBack | None


@dataclass(frozen=True)
class QueueStat:
    """Counts of every place of the diagram above at one moment. Two that differ only in their ages are equal.

    The fields that clients see have the same names in penstock.v1.runs_pb2.QueueStat and in penstock.client."""

    pending_prompts: int
    admitted: int
    in_flight: int
    queued: int
    delivered: int
    queued_bytes: int
    trained: int
    expired: int
    dead_lettered: int
    redelivered: int
    reclaimed: int
    discarded: int
    """Part of expired: groups that were dropped for good, whose prompts are not admitted again."""
    inserted: int
    """Groups that append accepted."""
    saved_bytes: int
    """Bytes of saved tokens of samples whose groups are not finished."""
    step: int
    committed_step: int
    """Newest step that a durable checkpoint covers."""
    policy_version: int
    term: int
    finished_step: int
    """The step at which the learner has finished; -1 if it never has. A learner that is started again may go beyond."""
    pending_age_ms: int = field(compare=False)
    """Time since the next prompt in line was submitted; 0 if none is pending."""
    ready_age_ms: int = field(compare=False)
    """Time since the next group in line was appended; 0 if none is ready."""
    admission_limit: int
    """Upper bound on trained + queued + in-flight groups."""
    admission_room: int
    """Number of prompts that the staleness bound allows to be admitted now."""

    @property
    def conservation_error(self) -> int:
        return self.admitted - self.trained - self.expired - self.dead_lettered - self.queued - self.in_flight

    @property
    def samples_per_insert(self) -> float:
        """Groups trained per group inserted. Below 1 by the groups that are queued or were dropped."""
        return self.trained / self.inserted if self.inserted else 0.0


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

        Returns whether the failure opened the server's breaker, which pauses its leasing: see penstock.replay.breaker.
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
