"""What the calls of the replay queue take and return, and the formula of admission."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from penstock.trajectory import Group

PromptState = Literal["pending", "leased", "queued", "trained", "dead_lettered", "cancelled"]
AppendOutcome = Literal["accepted", "duplicate", "full", "unknown"]
DropReason = Literal[
    "stale", "no_spread", "pass_rate", "too_long", "quarantined", "reward_failed", "remainder", "cancelled", "abandoned"
]
"""Why a group was dropped. `remainder` did not fill the last batch (`dataset.last_batch: drop`), and `abandoned` was
trained after the checkpoint that the run was rewound to."""


def kind_of(reason: str) -> str:
    """The first word of the reason of a failure. The queue counts reasons by it; the rest may quote a prompt."""
    word = re.match(r"[A-Za-z0-9_]+", reason)
    return word.group() if word else "other"


@dataclass(frozen=True)
class PromptRequest:
    """Prompts that are accepted as a whole. Once `owner` has used a key, it stands for these prompts for a week."""

    payloads: Sequence[bytes]
    priorities: Sequence[int]
    idempotency_key: str = ""
    owner: str = ""
    digest: str = ""
    """Digest of what the client asked for. The payloads may differ, because each try is traced by itself."""


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
class Origin:
    """Who made groups that no rollout server has leased: the sessions of a gateway, or an import."""

    name: str
    """It holds the leases of the groups, as a rollout server does under its id."""
    key: str
    """Groups with the same key and number are the same group, for a week."""


@dataclass(frozen=True)
class OfferedGroup:
    """A finished group without a lease."""

    number: int
    prompt: bytes
    """The encoded prompt, which is sampled again if the group expires."""
    priority: int
    group: Group
    """Its run, prompt and attempt are set when it is accepted."""


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
class FeedPosition:
    """How far a dataset has been submitted."""

    position: int
    """Number of the next prompt, over all epochs."""
    fingerprint: str
    """Hash of the dataset's rows and their order."""
    epoch_prompts: int = 0
    """Number of prompts of one epoch; 0 if the feed has not reported it."""
    last_id: int = field(default=0, compare=False)
    """In the answer to `feed`: the newest prompt id. If the call has submitted prompts, it is that of the last one."""
    owner: str = field(default="", compare=False)
    """In the answer to `feed`: the owner of an uploaded dataset."""

    def has_ended(self, epochs: int) -> bool:
        """Whether all prompts of so many epochs were submitted. 0 epochs have no end."""
        return 0 < epochs * self.epoch_prompts <= self.position


@dataclass(frozen=True)
class Outbox:
    """Which of a producer's accepted groups it may forget, and which it must append again."""

    done: tuple[int, ...]
    """Prompts whose group was committed, dead-lettered or superseded: forget them."""
    missing: tuple[int, ...]
    """Prompts whose group Redis lost with its tail: append it again."""


@dataclass(frozen=True)
class Delivery:
    """An encoded group that the learner has taken."""

    prompt_id: int
    payload: bytes


@dataclass(frozen=True)
class RunRewind:
    """The last time that the run was rewound to a checkpoint."""

    checkpoint: str
    """Path of the checkpoint."""
    term: int
    """The term that rewound it. Checkpoints of earlier terms that are newer than `checkpoint` are abandoned."""
    num_orders: int
    """How many rewinds to a version the operator had ordered by then."""


@dataclass(frozen=True)
class Committed:
    """What durable checkpoints cover, as far as the queue knows. A learner must start from a state that covers it."""

    step: int
    """Step of the newest commit."""
    trained: bytes
    """Bitmap of the committed prompts. The first byte's highest bit stands for prompt 0."""
    kept_after: int
    """The prompts of every commit after this step are kept, so the run can be rewound to this step, but no further."""
    rewind: RunRewind | None
    last_id: int = field(compare=False)
    """The newest prompt id that was given out."""


@dataclass(frozen=True, kw_only=True)
class QueueCounts:
    """Counts of the replay queue. Fields without a description count since the run began."""

    pending_prompts: int
    """Prompts that wait for a lease."""
    admitted: int
    in_flight: int
    """Prompts that rollout servers work on."""
    queued: int
    """Groups in the queue, including groups that the learner has taken since its last checkpoint."""
    delivered: int
    """The part of `queued` that the learner has taken."""
    queued_bytes: int
    trained: int
    expired: int
    dead_lettered: int
    redelivered: int
    reclaimed: int
    """Leases that expired, whose prompts were leased again."""
    discarded: int
    """The part of `expired` whose prompts are not admitted again."""
    admission_limit: int
    """Upper bound on trained + queued + in-flight groups."""
    admission_room: int
    """Prompts that may be admitted now."""
    inserted: int
    """Groups that append accepted."""
    saved_bytes: int = 0
    """Bytes of the saved tokens of samples whose groups are not finished."""


@dataclass(frozen=True, kw_only=True)
class QueueStat(QueueCounts):
    """The queue at one moment. Two that differ only in their ages are equal."""

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

    @property
    def conservation_error(self) -> int:
        return self.admitted - self.trained - self.expired - self.dead_lettered - self.queued - self.in_flight

    @property
    def samples_per_insert(self) -> float:
        """Groups trained per group inserted. Below 1 by the groups that are queued or were dropped."""
        return self.trained / self.inserted if self.inserted else 0.0

    def num_trained(self, groups_per_step: int) -> int:
        """Trained groups, including groups that no checkpoint covers yet, which count as delivered here."""
        return self.trained + min(self.delivered, max(0, self.step - self.committed_step) * groups_per_step)


@dataclass(frozen=True)
class Admission:
    limit: int
    """Upper bound on trained + queued + in-flight groups."""
    room: int
    """How many more prompts may be admitted now."""


def admission(
    *, step: int, trained: int, queued: int, in_flight: int, max_staleness: int, groups_per_step: int, base: int = 0
) -> Admission:
    """A prompt is admitted only while `trained + queued + in_flight < base + (max_staleness + step + 1) ·
    groups_per_step`. `base` is how many groups more were trained than `step` steps of this size have: 0, unless the run
    was continued with another `groups_per_step`. Groups beyond the limit could only be trained more than
    `max_staleness` steps after the policy they start with. Expired, discarded and dead-lettered groups are in none of
    the three terms, so each makes room for another. lease.lua applies the same formula; tests compare the two.

    Example: with two groups a step, staleness 1, nothing trained and one prompt in flight, three more may be admitted.

    >>> admission(step=0, trained=0, queued=0, in_flight=1, max_staleness=1, groups_per_step=2)
    Admission(limit=4, room=3)
    """
    limit = base + (max_staleness + step + 1) * groups_per_step
    return Admission(limit, max(0, limit - trained - queued - in_flight))


@dataclass(frozen=True)
class EvaluationProgress:
    """Progress and scores of an evaluation."""

    evaluation_id: str
    num_prompts: int
    num_finished: int
    score: float
    policy_version_min: int
    policy_version_max: int
    num_samples: int = 0
    pass_at: dict[int, float] = field(default_factory=dict)
    """pass@k over the prompts finished so far: see `penstock.sample_scores`. A sample passes with a reward of 1, or
    with a 1 in the part that `dataset.validation.score` names."""
    num_failed: int = 0
    """Finished prompts without samples: they failed too often or had no server. The score does not contain them."""


@dataclass(frozen=True)
class Evaluation(EvaluationProgress):
    """An evaluation, with what only the feed writes to files."""

    by_source: dict[str, dict[str, float]] = field(default_factory=dict)
    """Scores of each data source: see `penstock.sample_scores.scores_by_source`."""
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    """Mean of each part of the reward, by data source."""


def is_numbered(evaluation_id: str) -> bool:
    """Whether the id ends in a number, such as the step of a validation. Scores of other evaluations have no history,
    and the learner does not see them."""
    benchmark, _, number = evaluation_id.rpartition("-")
    return benchmark != "" and number.isascii() and number.isdigit()


@dataclass(frozen=True)
class KeptGroups:
    """The groups of an evaluation that are kept for the learner, which writes their text or has a model score them."""

    prompt_ids: tuple[int, ...] = ()
    num_omitted: int = 0
    """Groups for which there was no room."""


VALIDATION = "validation-"
"""Ids of the run's own evaluations begin with this."""
KEPT_EVALUATION_S = 3600
"""How long the groups of an evaluation are kept after the last of them was recorded."""
ALL_PROMPTS = 2**31
"""More prompts than an evaluation has."""
KEPT_EVALUATION_SHARE = 4
"""The kept groups of one evaluation have at most `replay.capacity_bytes` divided by this."""
