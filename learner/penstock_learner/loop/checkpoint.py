"""Checkpoints: model, optimizer, ledger, step and version as one unit.

A checkpoint is written to `term-T-step-N.partial` by all ranks of the roles that train (DCP), completed by the
controller with `trainer.json`, flushed, and renamed to `term-T-step-N`. Only a renamed folder counts. Groups are
acknowledged after the rename, never before. The term comes first: what a learner writes that was fenced off is never
newer than its successor's.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from penstock.errors import ConfigError, Fenced
from penstock_learner.loop.ledger import Ledger

TRAINER_FILE = "trainer.json"


def shards_folder(checkpoint: Path, role: str) -> Path:
    """Where the ranks of a role have their shards: the policy at the top, any other in a folder of its name."""
    return checkpoint if role == "policy" else checkpoint / role


@dataclass(frozen=True)
class TrainerState:
    """What the controller remembers besides the shards."""

    step: int = 0
    policy_version: int = 0
    term: int = 0
    ledger: list[tuple[int, int]] = field(default_factory=list)
    kl_coefficient: float | None = None
    feed_positions: dict[str, int] = field(default_factory=dict)
    """How far each dataset had been submitted. The positions that count are in Redis, beside the prompts."""
    store_id: str = ""
    """Of the queue that the ledger's prompt ids are of."""
    resumed_from: str = ""
    """What `checkpoint.resume` named when this line of checkpoints began; empty where it named none."""
    num_roll_backs: int = 0
    """Orders to roll back that the weights have followed."""
    roll_backs: list[tuple[int, int]] = field(default_factory=list)
    """Each version that was gone back to, and the one that then had its weights."""

    def make_ledger(self) -> Ledger:
        return Ledger(self.ledger)

    def check_store(self, store_id: str) -> None:
        """Refuse a queue whose prompt ids are not the ledger's: it would hold new prompts for trained ones."""
        if self.store_id and self.store_id != store_id:
            raise ConfigError(
                "this Redis is not the one of the checkpoint, or has lost everything; correct redis.url or restore "
                "its data, else start a new run, or set learner.checkpoint.resume to off"
            )


class CheckpointStore:
    """The checkpoints of one run's folder."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def partial_folder(self, step: int, term: int) -> Path:
        """Where the ranks write. Emptied first: what lies there is from a crash."""
        partial = self.partial_path(step, term)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def partial_path(self, step: int, term: int) -> Path:
        return self.folder / f"term-{term:06d}-step-{step:08d}.partial"

    @contextmanager
    def writing(self, partial: Path) -> Iterator[None]:
        """Around whatever writes there. Its errors are its own, unless the folder was taken away meanwhile: a learner
        that was suspended, and another has cleared up behind it."""
        try:
            yield
        except Exception as error:
            if partial.exists():
                raise
            raise Fenced(f"{partial} is gone; another learner has taken over, stop this one") from error

    def finish(self, partial: Path, state: TrainerState) -> Path:
        """Make the checkpoint durable: after this returns, its groups may be acknowledged."""
        final = partial.with_suffix("")
        with self.writing(partial):
            (partial / TRAINER_FILE).write_text(json.dumps(asdict(state)))
            for path in partial.rglob("*"):
                _flush(path)
            _flush(partial)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
        _flush(self.folder)
        abandoned = [path for path in self.folder.glob("term-*-step-*.partial") if path < partial]
        for old in [*self._finished()[: -self.keep], *abandoned]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def to_resume(self, resume: str) -> tuple[Path, TrainerState] | None:
        """By `learner.checkpoint.resume`. A named checkpoint is gone back to once: those made since then are newer."""
        newest = self.newest()
        if resume in ("auto", "off") or (newest is not None and newest[1].resumed_from == resume):
            return newest
        path = Path(resume)
        return path, replace(read_state(path), resumed_from=resume)

    def newest(self) -> tuple[Path, TrainerState] | None:
        finished = self._finished()
        if not finished:
            return None
        return finished[-1], read_state(finished[-1])

    def of_version(self, policy_version: int) -> Path | None:
        """The newest checkpoint with the weights of a version."""
        found = [path for path in self._finished() if read_state(path).policy_version == policy_version]
        return found[-1] if found else None

    def _finished(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("term-*-step-*") if path.suffix != ".partial")


def read_state(path: Path) -> TrainerState:
    """Of a finished checkpoint."""
    try:
        fields = json.loads((path / TRAINER_FILE).read_text())
        for name in ("ledger", "roll_backs"):
            fields[name] = [(int(first), int(second)) for first, second in fields.get(name, [])]
        return TrainerState(**fields)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"checkpoint {path} is damaged ({error}); remove it to use the one before, or set "
            "learner.checkpoint.resume to off or to another"
        ) from error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
