"""A term: the time during which one learner, and no other, trains a run. It starts from a checkpoint, which stores its
state as a `TrainerState`.

The term owns what no rank holds, and is the only one that changes it: the step, the ledger (the prompts that the
weights were trained on), the manifests (the batches that an earlier learner had taken), the lineage (each rewind to an
older version, and why) and the KL coefficient. Everyone else reads the term.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.config.algorithms import KLConfig
from penstock.errors import ConfigError
from penstock.trajectory import Group

MAX_REWINDS = 64
"""Rewinds that a term remembers and its checkpoints store. Groups from before them count as older than they are."""
_MAX_CORRECTION = 0.2


class Ledger:
    """A set of prompt ids that only grows, stored as disjoint, sorted, inclusive ranges. Prompts finish nearly in
    order, so a handful of ranges is enough for millions of prompts."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._ranges = [(int(first), int(last)) for first, last in ranges]
        self._volatile: set[int] = set()
        """Prompts that no durable checkpoint covers yet."""

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return list(self._ranges)

    def __contains__(self, prompt_id: int) -> bool:
        index = bisect_right(self._ranges, (prompt_id, float("inf"))) - 1
        return index >= 0 and prompt_id <= self._ranges[index][1]

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self._ranges)

    @property
    def last_id(self) -> int:
        """0 if the ledger is empty."""
        return self._ranges[-1][1] if self._ranges else 0

    def missing(self, bitmap: bytes) -> list[int]:
        """The prompts of a bitmap that the ledger does not hold. The first byte's highest bit stands for prompt 0."""
        bits = np.unpackbits(np.frombuffer(bitmap, np.uint8))
        for first, last in self._ranges:
            bits[first : last + 1] = 0
        return [int(prompt_id) for prompt_id in np.flatnonzero(bits)]

    def absent_from(self, bitmap: bytes) -> list[int]:
        """The prompts of the ledger that a bitmap does not have."""
        bits = np.unpackbits(np.frombuffer(bitmap, np.uint8))
        absent: list[int] = []
        for first, last in self._ranges:
            known = bits[first : last + 1]
            absent += [first + int(place) for place in np.flatnonzero(known == 0)]
            absent += range(first + len(known), last + 1)
        return absent

    def is_durable(self, prompt_id: int) -> bool:
        """Whether a durable checkpoint covers the prompt, so that its group may be acknowledged."""
        return prompt_id in self and prompt_id not in self._volatile

    def mark_durable(self, prompt_ids: Iterable[int]) -> None:
        """Called when a durable checkpoint covers these prompts, so that their groups may be acknowledged."""
        self._volatile.difference_update(prompt_ids)

    def add(self, prompt_ids: Iterable[int]) -> None:
        """Add prompts that were trained. Adding one twice is a bug: its group would have been trained twice."""
        fresh = sorted(prompt_ids)
        assert len(set(fresh)) == len(fresh) and not any(prompt_id in self for prompt_id in fresh), "trained twice"
        merged: list[tuple[int, int]] = []
        for first, last in sorted(self._ranges + [(prompt_id, prompt_id) for prompt_id in fresh]):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        self._ranges = merged
        self._volatile.update(fresh)


RewindCause = Literal["order", "restart"]


@dataclass(frozen=True)
class Rewind:
    """Training continues from the weights of `from_version`, which are called `to_version` from then on."""

    from_version: int
    to_version: int
    why: RewindCause = "order"
    """`order`: an operator ordered it, by `penstock policies rewind` or by `learner.checkpoint.rewind`. The versions
    in between are abandoned. `restart`: a learner started again from its checkpoint. Nothing is abandoned: the steps
    after the checkpoint are trained once more, with the same batches, and make the same weights again."""

    def abandons(self, group: Group) -> bool:
        """Whether an abandoned version sampled a token of the group."""
        return self.why == "order" and any(
            self.from_version < segment.policy_version < self.to_version
            for trajectory in group.trajectories
            for segment in trajectory.segments
        )


@dataclass(frozen=True)
class TrainerState:
    """The part of a checkpoint that no rank holds, as `trainer.json` stores it."""

    step: int = 0
    policy_version: int = 0
    term: int = 0
    ledger: list[tuple[int, int]] = field(default_factory=list)
    kl_coefficient: float | None = None
    feed_positions: dict[str, int] = field(default_factory=dict)
    """How far each dataset had been submitted. For information only: a later term uses the positions in Redis."""
    store_id: str = ""
    """Identifies the queue whose prompt ids the ledger holds."""
    resumed_from: str = ""
    """The value of `checkpoint.resume` if the run was started from the checkpoint that it names, or empty."""
    num_orders: int = 0
    """How many of the operator's orders to rewind were handled, including orders that could not be followed."""
    lineage: tuple[Rewind, ...] = ()
    tokenizer: str = ""
    """`tokenizer_digest` of the model folder. Empty in checkpoints of `penstock sft`."""

    def check_store(self, store_id: str) -> None:
        """Raise ConfigError for a queue other than the ledger's: its new prompts would have the ids of trained ones."""
        if self.store_id and self.store_id != store_id:
            raise ConfigError(
                "this Redis is not the one that the checkpoint was written with, or it has lost its data; correct "
                "redis.url or restore the data, or start a new run, or set learner.checkpoint.resume to off"
            )

    def check_tokenizer(self, digest: str) -> None:
        """Raise ConfigError for another tokenizer than the weights were trained with: ids would mean other text."""
        if self.tokenizer and self.tokenizer != digest:
            raise ConfigError(
                "the tokenizer in model.path is not the one that the checkpoint was trained with; restore its files, "
                "or start a new run"
            )


@dataclass(frozen=True)
class KLController:
    """The KL coefficient, which a checkpoint stores, and how it changes. An adaptive one follows `coefficient *= 1 +
    clip(KL / target - 1, -0.2, 0.2) * num_sequences / horizon`."""

    config: KLConfig
    coefficient: float

    def updated(self, measured_kl: float, num_sequences: int) -> KLController:
        """The controller after a step over `num_sequences` sequences whose mean KL per token was `measured_kl`. A KL
        that is not finite is ignored: its step was skipped."""
        if self.config.controller == "fixed" or not math.isfinite(measured_kl):
            return self
        error = min(max(measured_kl / self.config.target - 1, -_MAX_CORRECTION), _MAX_CORRECTION)
        return replace(self, coefficient=self.coefficient * (1 + error * num_sequences / self.config.horizon))


def make_kl_controller(config: KLConfig, coefficient: float | None = None) -> KLController:
    """The controller of a run. `coefficient` is the value from which an adaptive one continues."""
    continues = config.controller != "fixed" and coefficient is not None
    return KLController(config, coefficient if continues and coefficient is not None else config.coefficient)


@dataclass
class Term:
    """The state of training that no role holds. A checkpoint stores it as a `TrainerState`, which describes the fields
    that both have."""

    number: int = 0
    store_id: str = ""
    step: int = 0
    """The last step that was trained."""
    policy_version: int = 0
    """The version of the weights that the policy's ranks hold."""
    ledger: Ledger = field(default_factory=Ledger)
    kl: KLController = field(default_factory=lambda: KLController(KLConfig(), 0.0))
    resumed_from: str = ""
    num_orders: int = 0
    lineage: tuple[Rewind, ...] = ()
    """The newest MAX_REWINDS rewinds of the run, oldest first."""
    cause: RewindCause = "restart"
    """Why training continues from the checkpoint that the term starts from. See `Rewind.why`."""
    manifests: dict[int, list[int]] = field(default_factory=dict)
    """Prompt ids that an earlier learner had taken for steps that no checkpoint covers, by step."""
    num_overdue: int = 0
    """Groups that waited when the term began and cannot all be trained within `replay.max_staleness`."""
    uncommitted: list[int] = field(default_factory=list)
    """Prompts that were trained since the last checkpoint."""

    def take_manifest(self, step: int) -> list[int]:
        """The prompts that an earlier learner had taken for the step. They are returned once."""
        return self.manifests.pop(step, [])

    def add_trained(self, step: int, prompt_ids: Sequence[int], kl_reference: float, num_sequences: int) -> None:
        """Count a batch as trained. The last two arguments are numbers of its step."""
        self.step = step
        self.kl = self.kl.updated(kl_reference, num_sequences)
        self.ledger.add(prompt_ids)
        self.uncommitted += prompt_ids

    def take_uncommitted(self) -> list[int]:
        """The prompts that the next checkpoint covers and none before it."""
        taken, self.uncommitted = self.uncommitted, []
        return taken

    def advance(self, version: int) -> None:
        """The policy's ranks hold weights that are called `version` now."""
        self.policy_version = version

    def handle_orders(self, num_orders: int) -> None:
        """So many of the operator's orders to rewind are handled. Each is handled once."""
        self.num_orders = num_orders

    def rewind(self, from_version: int, to_version: int, why: RewindCause = "order") -> None:
        """The policy's ranks hold the weights of `from_version`, which are called `to_version` now."""
        self.lineage = (*self.lineage, Rewind(from_version, to_version, why))[-MAX_REWINDS:]
        self.policy_version = to_version

    @property
    def last_rewind(self) -> Rewind | None:
        return self.lineage[-1] if self.lineage else None

    def abandons(self, group: Group) -> bool:
        """Whether a version that a rewind has abandoned sampled a token of the group."""
        return any(rewind.abandons(group) for rewind in self.lineage)

    def were_rewound(self, versions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which versions lie between those of a rewind. After a restart too, a lost batch may have changed them."""
        between = [(each.from_version < versions) & (versions < each.to_version) for each in self.lineage]
        return np.any(between, axis=0) if between else np.zeros(versions.shape, dtype=bool)

    def oldest_version(self, group: Group) -> int:
        """The oldest version that sampled a token of the group, renumbered by `in_steps`."""
        return int(self.in_steps(np.array(group.min_version))) if self.lineage else group.min_version

    def in_steps(self, versions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Renumber versions so that their differences are steps of training. A rewind's `from_version` counts as its
        `to_version`, and older versions move along: with 3 and 6, version 3 counts as 6 and version 2 as 5. After an
        order, 4 and 5 are abandoned and have no meaningful number. After a restart they move too: 4 counts as 7, which
        will have its weights. Its samples are newer than the policy, so their age is negative."""
        given = np.array([rewind.from_version for rewind in self.lineage])
        starts, numbers = given, versions
        for index, rewind in enumerate(self.lineage):
            # A later rewind may start before an earlier one, which has already renumbered its version.
            start = starts[index]
            abandons = rewind.why == "order"
            moves = numbers <= start if abandons else versions < rewind.to_version
            moves_start = starts <= start if abandons else given < rewind.to_version
            numbers = np.where(moves, numbers + rewind.to_version - start, numbers)
            starts = np.where(moves_start, starts + rewind.to_version - start, starts)
        return numbers

    def trainer_state(self, feed_positions: dict[str, int]) -> TrainerState:
        return TrainerState(
            step=self.step,
            policy_version=self.policy_version,
            term=self.number,
            ledger=self.ledger.ranges,
            kl_coefficient=self.kl.coefficient,
            feed_positions=feed_positions,
            store_id=self.store_id,
            resumed_from=self.resumed_from,
            num_orders=self.num_orders,
            lineage=self.lineage,
        )
