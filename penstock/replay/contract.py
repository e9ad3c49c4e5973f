"""The replay queue's contract, split by who may call what.

A prompt passes through these places, and is in exactly one of them at any time:

    pending ──lease──► leased ──append──► ready ──take──► delivered ──commit──► trained
       ▲                 │                  └──────┬──────────┤
       └── give back, ───┘                         │          └─ dead_letter ─► dead letters
           lease expiry                            ├─ expire (the prompt is pending again)
                                                   └─ discard (the prompt is finished, untrained)

    lease, append, give_back, heartbeat            rollout servers
    take, commit, expire, discard, dead_letter     the learner that holds the current term
    submit, feed                                   the gateway, and whoever feeds a dataset

`admitted` counts first leases, and leases after an expiry; a prompt whose lease was lost is still in flight. So
`admitted = trained + expired + dead_lettered + queued + in_flight` at every moment (queued = ready + delivered;
expired counts the discarded too).

Every admission has a number. Ready groups are taken in this order (`fifo`) or newest version first (`freshest`). What
happens to a group that would be trained past the staleness bound is `replay.stale_policy`:

    wait      take stops before a prompt that is still in flight, so groups are trained exactly in order of admission.
              With that the limiter alone holds the bound: the k-th admission that is not dropped is trained in step
              k / groups_per_step, at most max_staleness steps after the one it was admitted in. A straggler stalls
              training until its lease is reclaimed or it is dead-lettered.
    drop      take passes stragglers by; the learner expires what is too old when it arrives, and its prompt is
              admitted again.
    correct   take passes stragglers by; the learner trains what is too old as it is, weighed off-policy.

Evaluation prompts take the lane beside this one: leased without admission, recorded in their evaluation, never queued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

PromptState = Literal["pending", "leased", "queued", "trained", "dead_lettered", "cancelled"]
AppendOutcome = Literal["accepted", "duplicate", "full", "unknown"]


@dataclass(frozen=True)
class Submission:
    prompt_ids: tuple[int, ...]
    replayed: bool
    """An earlier request with the same idempotency key had been accepted; these are its ids."""


@dataclass(frozen=True)
class PromptStatus:
    prompt_id: int
    state: PromptState
    attempt: int
    payload: bytes
    """The encoded prompt; empty once it is trained or dead-lettered."""


@dataclass(frozen=True)
class Lease:
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
class Evaluation:
    evaluation_id: str
    num_prompts: int
    num_finished: int
    score: float
    policy_version_min: int
    policy_version_max: int
    num_samples: int = 0
    pass_at: dict[int, float] = field(default_factory=dict)
    """pass@k over the prompts finished so far: see `penstock.sample_scores`. A sample passes with a reward of 1."""


@dataclass(frozen=True)
class FeedPosition:
    """How far a dataset has been submitted."""

    position: int
    """Number of the next prompt, over all epochs."""
    fingerprint: str
    """Of the data and its order."""


@dataclass(frozen=True)
class Outbox:
    """What a producer still has to care for."""

    done: tuple[int, ...]
    """Prompts whose group was committed, buried or superseded: forget them."""
    missing: tuple[int, ...]
    """Prompts whose group Redis lost with its tail: append it again."""


@dataclass(frozen=True)
class Delivery:
    """One group handed to the learner, still encoded."""

    prompt_id: int
    payload: bytes


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
    """Part of expired: dropped for good, their prompts are not admitted again."""
    inserted: int
    """Groups that append accepted."""
    step: int
    policy_version: int
    term: int
    pending_age_ms: int = field(compare=False)
    """Since the prompt that is next in line was submitted; 0 where none is pending."""
    ready_age_ms: int = field(compare=False)
    """Time since the group that is next in line was appended, or 0 if none is ready."""
    admission_limit: int
    """What trained, queued and in flight may add up to."""
    admission_room: int
    """Prompts that may be admitted now, as far as staleness goes."""

    @property
    def conservation_error(self) -> int:
        return self.admitted - self.trained - self.expired - self.dead_lettered - self.queued - self.in_flight

    @property
    def samples_per_insert(self) -> float:
        """Groups trained for each group inserted: 1 in the long run, less what is queued or was dropped."""
        return self.trained / self.inserted if self.inserted else 0.0


class PromptIntake(Protocol):
    """What the gateway needs."""

    async def submit(self, payloads: Sequence[bytes], priorities: Sequence[int], idempotency_key: str) -> Submission:
        """Accept all prompts or none. Durable as soon as it returns, as far as Redis is."""
        ...

    async def feed(
        self, name: str, fingerprint: str, position: int, payloads: Sequence[bytes], priorities: Sequence[int]
    ) -> FeedPosition:
        """Submit the prompts at `position` of a dataset, where that is how far it has been submitted: so every one is
        submitted once, whoever is killed. Otherwise, and without prompts, nothing changes. Returns where it stands."""
        ...

    async def create_evaluation(self, evaluation_id: str, payloads: Sequence[bytes]) -> Evaluation:
        """Queue held-out prompts. Repeating an id changes nothing and returns the first one."""
        ...

    async def get_evaluation(self, evaluation_id: str) -> Evaluation: ...

    async def get_prompt(self, prompt_id: int) -> PromptStatus: ...

    async def get_group(self, prompt_id: int) -> bytes: ...

    async def stat(self) -> QueueStat: ...

    async def dead_letter_reasons(self) -> dict[str, int]:
        """How many were dead-lettered, by the first word of the reason."""
        ...

    async def evaluation_scores(self) -> dict[str, float]:
        """The newest score by benchmark: of evaluations that are finished, named without the number at the end."""
        ...

    async def expired_reasons(self) -> dict[str, int]:
        """How many groups were expired (`stale`) or discarded, by the first word of the reason."""
        ...


class GroupProducer(Protocol):
    """What a rollout server needs."""

    async def lease(self, server_id: str, max_prompts: int) -> list[Lease]:
        """Lease up to `max_prompts` as far as admission and the byte limit allow, in one atomic call.

        Training prompts are leased while `accepted + running < (max_staleness + step + 1) · groups_per_step`, and
        while there are fewer bytes than `capacity_bytes`. Leases that ran out are taken back first, and leased again
        before anything new: they are admitted already, so neither bound holds them back."""
        ...

    async def wait_for_prompts(self, timeout_s: float) -> None:
        """Wait until a lease may succeed that could not before, or for `timeout_s`. It may return early, and a lease
        may succeed without it: leases run out, and pauses end, without a signal. So call `lease` after it in any
        case."""
        ...

    async def heartbeat(self, server_id: str, leases: Sequence[Lease]) -> list[int]:
        """Renew; returns the prompt ids whose lease this server no longer holds."""
        ...

    async def append(self, lease: Lease, payload: bytes, min_version: int) -> AppendOutcome:
        """Append a finished group. Idempotent: the first group of a prompt counts, every later one is a duplicate.

        `full`: over `capacity_bytes`; try again later. A queue from which nothing can be taken is never full for the
        group that unblocks it. Raises QueueFull where the store itself is out of memory."""
        ...

    async def append_many(self, groups: Sequence[FinishedGroup]) -> list[AppendOutcome]:
        """As `append` for each in turn, in few exchanges with the store; outcomes in the same order."""
        ...

    async def record_evaluation(
        self, evaluation_id: str, lease: Lease, rewards: Sequence[float], min_version: int, max_version: int
    ) -> None: ...

    async def give_back(self, server_id: str, lease: Lease, failure: str = "", *, is_final: bool = False) -> None:
        """Return a prompt. With a `failure` it counts towards max_attempts, past which it is dead-lettered (at once if
        it `is_final`); a held-out prompt then counts as finished in its evaluation, without samples."""
        ...

    async def reconcile(self, held: Sequence[Lease]) -> Outbox:
        """Compare the producer's unsettled groups with the queue."""
        ...


class GroupConsumer(Protocol):
    """What the learner needs. All but `store_id`, `take_term`, `fetch` and `stat` raise Fenced once a newer term was
    taken."""

    async def store_id(self) -> str:
        """A random name of what holds this run's queue, made when it is first asked for. A store that lost everything,
        or another one, has another name."""
        ...

    async def take_term(self, at_least: int) -> int:
        """Become the only learner: returns a term above every earlier one and above `at_least`."""
        ...

    async def restore(self, step: int) -> dict[int, list[int]]:
        """Start from a checkpoint of `step`: the batch manifests that Redis holds for later steps, by step.

        Their groups are delivered again, in the same batches."""
        ...

    async def feed_positions(self) -> dict[str, int]:
        """How far each dataset has been submitted, by name."""
        ...

    async def take(self, step: int, max_groups: int) -> list[int]:
        """Move ready groups into the manifest of `step` and return their prompt ids, in the configured order.

        Under `wait` none is taken that was admitted after a prompt still in flight. What the manifest holds that this
        learner was not told of, by `restore` or an earlier take, comes first and alone: the answer to it was lost."""
        ...

    async def wait_for_groups(self, timeout_s: float) -> None:
        """Wait until a group may be taken that could not be before, or for `timeout_s`. It may return early."""
        ...

    async def fetch(self, prompt_ids: Sequence[int]) -> list[Delivery]:
        """The groups of these prompts that are still queued; the others are left out."""
        ...

    async def commit(self, step: int, prompt_ids: Sequence[int]) -> int:
        """Acknowledge and delete groups that a durable checkpoint covers; returns how many were still there.

        Closes the manifests up to `step`. What they hold besides is ready again."""
        ...

    async def expire(self, prompt_id: int) -> None:
        """Drop a group that is too old and admit its prompt again."""
        ...

    async def discard(self, prompt_id: int, reason: str) -> None:
        """Drop a group that is not worth training and forget its prompt; another one may be admitted in its place."""
        ...

    async def dead_letter(self, prompt_id: int, reason: str) -> None: ...

    async def publish(self, policy_version: int, step: int, policy: bytes) -> None:
        """Make `policy_version` the run's current one, which opens admission for the next step.

        `policy` is its encoded registry record."""
        ...

    async def allocate_version(self, at_least: int) -> int:
        """A policy version that this run has never used."""
        ...

    async def stat(self) -> QueueStat: ...
