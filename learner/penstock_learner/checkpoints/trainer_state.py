"""The state of training that no rank holds, as `trainer.json` of a checkpoint stores it: the step, the ledger (the
prompts that the weights were trained on) and the lineage (each rewind to an older version, and why).
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.codec import read_known_fields
from penstock.errors import CheckpointDamaged, ConfigError
from penstock.trajectory import Group
from penstock_learner.checkpoint_files import FileRecord, read_manifest

TRAINER_FILE = "trainer.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.*", "merges.txt", "added_tokens.json", "*.tiktoken")
MAX_REWINDS = 64
"""Rewinds that a term remembers and its checkpoints store. Groups from before them count as older than they are."""


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

    def missing(self, bitmap: bytes) -> list[int]:
        """The prompts of a bitmap that the ledger does not hold. The first byte's highest bit stands for prompt 0."""
        bits = np.unpackbits(np.frombuffer(bitmap, np.uint8))
        for first, last in self._ranges:
            bits[first : last + 1] = 0
        return [int(prompt_id) for prompt_id in np.flatnonzero(bits)]

    def is_durable(self, prompt_id: int) -> bool:
        """Whether a durable checkpoint covers the prompt, so that its group may be acknowledged."""
        return prompt_id in self and prompt_id not in self._volatile

    def mark_durable(self, prompt_ids: Iterable[int]) -> None:
        """Called when a checkpoint that covers these prompts is on disk."""
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
_OLD_NAMES = {"target": "from_version", "new_version": "to_version"}
"""Fields of a rewind in checkpoints of older releases."""


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


class Lineage:
    """The newest MAX_REWINDS rewinds of a run, oldest first."""

    def __init__(self, rewinds: Iterable[Rewind] = ()) -> None:
        self.rewinds = list(rewinds)[-MAX_REWINDS:]

    def __len__(self) -> int:
        return len(self.rewinds)

    def add(self, rewind: Rewind) -> None:
        self.rewinds = [*self.rewinds, rewind][-MAX_REWINDS:]

    def abandons(self, group: Group) -> bool:
        return any(rewind.abandons(group) for rewind in self.rewinds)

    def oldest_version(self, group: Group) -> int:
        """The oldest version that sampled a token of the group, renumbered by `in_steps`."""
        return int(self.in_steps(np.array(group.min_version))) if self.rewinds else group.min_version

    def in_steps(self, versions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Renumber versions so that their differences are steps of training. A rewind's `from_version` counts as its
        `to_version`, and older versions move along: with 3 and 6, version 3 counts as 6 and version 2 as 5. After an
        order, 4 and 5 are abandoned and have no meaningful number. After a restart they move too: 4 counts as 7, which
        will have its weights. Its samples are newer than the policy, so their age is negative."""
        given = np.array([rewind.from_version for rewind in self.rewinds])
        starts, numbers = given, versions
        for index, rewind in enumerate(self.rewinds):
            # A later rewind may start before an earlier one, which has already renumbered its version.
            start = starts[index]
            abandons = rewind.why == "order"
            moves = numbers <= start if abandons else versions < rewind.to_version
            moves_start = starts <= start if abandons else given < rewind.to_version
            numbers = np.where(moves, numbers + rewind.to_version - start, numbers)
            starts = np.where(moves_start, starts + rewind.to_version - start, starts)
        return numbers


@dataclass(frozen=True)
class TrainerState:
    """The part of a checkpoint that no rank holds, as `trainer.json` stores it."""

    step: int = 0
    policy_version: int = 0
    term: int = 0
    ledger: list[tuple[int, int]] = field(default_factory=list)
    kl_coefficient: float | None = None
    feed_positions: dict[str, int] = field(default_factory=dict)
    """How far each dataset had been submitted. For information only: a resumed run uses the positions in Redis."""
    store_id: str = ""
    """Identifies the queue whose prompt ids the ledger holds."""
    resumed_from: str = ""
    """The value of `checkpoint.resume` if the run was started from the checkpoint that it names, or empty."""
    num_orders: int = 0
    """How many of the operator's orders to rewind were handled."""
    lineage: list[Rewind] = field(default_factory=list)
    tokenizer: str = ""
    """`tokenizer_digest` of the model folder. Empty in checkpoints of older releases."""

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


def tokenizer_digest(model_path: Path) -> str:
    """A digest of the files that say which text a token id means. Chat templates are not among them. Blocks."""
    digest = hashlib.sha256()
    for file in sorted(found for pattern in TOKENIZER_FILES for found in model_path.glob(pattern)):
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def read_state(path: Path) -> TrainerState:
    """The trainer state of a finished checkpoint. Raises CheckpointDamaged if its file or manifest is damaged."""
    file = path / TRAINER_FILE
    try:
        content = file.read_bytes()
        expected, found = read_manifest(path).get(TRAINER_FILE), FileRecord.of(content)
        if found != expected:
            raise CheckpointDamaged(f"{file} is damaged: expected {expected}, found {found}")
        state = read_known_fields(TrainerState, json.loads(content))
        ranges = [(int(a), int(b)) for a, b in state.ledger]
        lineage: Any = state.lineage
        named = [{_OLD_NAMES.get(name, name): value for name, value in each.items()} for each in lineage]
        rewinds = [read_known_fields(Rewind, fields) for fields in named]
        return replace(state, ledger=ranges, lineage=rewinds)
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{file} is missing") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(f"{file} is damaged ({error})") from error
