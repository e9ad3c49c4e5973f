"""Checkpoints: model, optimizer, ledger, step and version as one unit.

All ranks of the trained roles write their shards to `term-T-step-N.partial` (DCP). The controller adds `trainer.json`,
flushes the folder and renames it to `term-T-step-N`. Only a renamed folder counts. Groups are acknowledged after the
rename, never before. The term comes first in the name, so a checkpoint of a learner that was fenced off never looks
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
from penstock.records import read_known_fields
from penstock_learner.checkpoints.ledger import Ledger

TRAINER_FILE = "trainer.json"


def shards_folder(checkpoint: Path, role: str) -> Path:
    """Where a role's ranks write their shards: the policy at the top, other roles in a folder of their name."""
    return checkpoint if role == "policy" else checkpoint / role


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
    num_roll_backs: int = 0
    """How many of the operator's roll back orders were handled."""
    roll_backs: list[tuple[int, int]] = field(default_factory=list)
    """Each version that was rolled back to, and the new version that then had its weights."""

    def make_ledger(self) -> Ledger:
        return Ledger(self.ledger)

    def check_store(self, store_id: str) -> None:
        """Raise ConfigError for a queue other than the ledger's: its new prompts would have the ids of trained ones."""
        if self.store_id and self.store_id != store_id:
            raise ConfigError(
                "this Redis is not the one that the checkpoint was written with, or it has lost its data; correct "
                "redis.url or restore the data, or start a new run, or set learner.checkpoint.resume to off"
            )


class CheckpointStore:
    """The checkpoints of one run's folder."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def partial_folder(self, step: int, term: int) -> Path:
        """Make an empty folder for the ranks to write to. Removes files that a crashed learner left. Blocks."""
        partial = self.partial_path(step, term)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def partial_path(self, step: int, term: int) -> Path:
        return self.folder / f"term-{term:06d}-step-{step:08d}.partial"

    @contextmanager
    def writing(self, partial: Path) -> Iterator[None]:
        """Wraps code that writes to `partial`. An error becomes Fenced if the folder is gone.

        The folder is gone if this learner was suspended and its successor has removed it meanwhile."""
        try:
            yield
        except Exception as error:
            if partial.exists():
                raise
            raise Fenced(f"{partial} is gone; another learner has taken over, stop this one") from error

    def finish(self, partial: Path, state: TrainerState) -> Path:
        """Make the checkpoint durable, then remove old ones. Its groups may be acknowledged afterwards. Blocks."""
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
        """The checkpoint that `learner.checkpoint.resume` asks for.

        If `resume` names a checkpoint, that checkpoint is used once. Afterwards the run continues from its own newer
        checkpoints."""
        newest = self.newest()
        if resume in ("auto", "off") or (newest is not None and newest[1].resumed_from == resume):
            return newest
        path = Path(resume)
        return path, replace(read_state(path), resumed_from=resume)

    def newest(self) -> tuple[Path, TrainerState] | None:
        """The newest finished checkpoint, or None."""
        finished = self._finished()
        if not finished:
            return None
        return finished[-1], read_state(finished[-1])

    def newest_term(self) -> int:
        """The highest term that has finished a checkpoint; 0 without one."""
        return max((_term_of(path) for path in self._finished()), default=0)

    def of_version(self, policy_version: int) -> Path | None:
        """The newest checkpoint that holds the weights of a version. Reads every checkpoint's `trainer.json`."""
        found = [path for path in self._finished() if read_state(path).policy_version == policy_version]
        return found[-1] if found else None

    def _finished(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("term-*-step-*") if path.suffix != ".partial")


def read_state(path: Path) -> TrainerState:
    """The trainer state of a finished checkpoint, which another version of Penstock may have written."""
    try:
        state = read_known_fields(TrainerState, json.loads((path / TRAINER_FILE).read_text()))
        ranges, roll_backs = ([(int(a), int(b)) for a, b in pairs] for pairs in (state.ledger, state.roll_backs))
        return replace(state, ledger=ranges, roll_backs=roll_backs)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"checkpoint {path} is damaged ({error}); remove it to use the one before it, or set "
            "learner.checkpoint.resume to off or to another checkpoint"
        ) from error


def _term_of(path: Path) -> int:
    return int(path.name.split("-")[1])


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
