"""Checkpoints: model, optimizer, ledger, step and version as one unit.

All ranks of the trained roles write their shards to `term-T-step-N.partial` (DCP). The controller adds `trainer.json`
and the checksums of all files (checkpoint_files.py), flushes the folder and renames it to `term-T-step-N`. Only a
renamed folder counts. Groups are acknowledged after the rename, never before. The term comes first in the name, so a
checkpoint of a learner that was fenced off never looks newer than its successor's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

from penstock.errors import CheckpointDamaged, ConfigError, DiskFull, Fenced, Unavailable
from penstock.machine import is_disk_full, measure_disk
from penstock.replay.queue_types import RunRewind
from penstock_learner.checkpoint_files import FileRecord, find_damage, flush, read_manifest, write_manifest
from penstock_learner.checkpoints.trainer_state import TRAINER_FILE, TrainerState, read_state
from penstock_learner.checkpoints.uploads import CheckpointUploads

NO_FILES: Mapping[str, FileRecord] = MappingProxyType({})


def shards_folder(checkpoint: Path, role: str) -> Path:
    """Where a role's ranks write their shards: the policy at the top, other roles in a folder of their name."""
    return checkpoint if role == "policy" else checkpoint / role


@dataclass(eq=False)
class CheckpointStore:
    """The checkpoints of one run's folder."""

    folder: Path
    keep: int
    uploads: CheckpointUploads | None = None
    """Where checkpoints are also kept, if the config names an object store."""
    rewind: RunRewind | None = None
    """The run's last rewind to a checkpoint, once a take-over has read it."""
    tokenizer: str = ""
    """`tokenizer_digest` of the run's model folder, which its checkpoints record."""

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
        """Turns errors of code that writes to `partial` into Fenced if the folder is gone, because a successor has
        removed it, and DiskFull if the disk is full; then the folder is removed."""
        try:
            yield
        except Exception as error:
            if not partial.exists():
                raise Fenced(f"{partial} is gone; another learner has taken over, stop this one") from error
            if not is_disk_full(error, partial):
                raise
            shutil.rmtree(partial, ignore_errors=True)
            space = measure_disk(self.folder)
            raise DiskFull(
                f"no space is left to write {partial.with_suffix('').name} ({space}); free space there, lower "
                "learner.checkpoint.keep, or move run_dir, then start the learner again; it continues from its last "
                "checkpoint, and no group is lost"
            ) from error

    def finish(self, partial: Path, state: TrainerState, shards: Mapping[str, FileRecord] = NO_FILES) -> Path:
        """Make the checkpoint durable, then remove old ones. Its groups may be acknowledged afterwards. Blocks.
        `shards` describes the files that the ranks have written; other files are read."""
        final = partial.with_suffix("")
        with self.writing(partial):
            trainer = json.dumps(asdict(replace(state, tokenizer=self.tokenizer))).encode()
            (partial / TRAINER_FILE).write_bytes(trainer)
            write_manifest(partial, {**shards, TRAINER_FILE: FileRecord.of(trainer)})
            for path in partial.rglob("*"):
                flush(path)
            flush(partial)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
        flush(self.folder)
        # Checkpoints that the run abandoned in a rewind cannot replace this one, so they do not count as kept.
        kept = [path for path in self._usable(self.rewind) if path.parent == self.folder][: self.keep]
        unfinished = [path for path in self.folder.glob("term-*-step-*.partial") if path < partial]
        for old in [*(path for path in self.newest_first() if path not in kept), *unfinished]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def upload(self, checkpoint: Path) -> None:
        """Make a checkpoint of this folder durable in the object store, if there is one. Blocks."""
        if self.uploads is not None and checkpoint.parent.absolute() == self.folder.absolute():
            self.uploads.upload(checkpoint, lambda name: self._is_usable(name, self.rewind))

    def abandon_upload(self) -> None:
        if self.uploads is not None:
            self.uploads.abandoned.set()

    def candidates(self, resume: str, rewind: RunRewind | None = None) -> list[Path]:
        """The checkpoints that `learner.checkpoint.resume` allows, the first choice first. A newer one is fetched from
        the object store first. A checkpoint that `resume` names is used once; afterwards the run continues from its own
        newer ones. Checkpoints that the run abandoned in a rewind are skipped."""
        if resume == "off":
            return []
        if self.uploads is not None:
            self.uploads.fetch_newest(self.folder, lambda name: self._is_usable(name, rewind))
        found = self._usable(rewind)
        if resume == "auto" or self._resumed_from(found) == Path(resume).absolute():
            return found
        if not Path(resume).is_dir():
            raise ConfigError(f"learner.checkpoint.resume: {resume} is not a checkpoint's folder")
        return [Path(resume)]

    def of_the_run(self) -> list[Path]:
        """The checkpoints of the run, newest first, without the ones abandoned in a rewind. Does not need Redis.
        Raises ConfigError if a learner was about to rewind and has not started again since."""
        rewind, is_done = read_rewind(self.folder)
        if rewind is None or is_done:
            return self._usable(rewind)
        later = [path for path in self.newest_first() if _term_of(path) >= rewind.term]
        if not later:
            raise ConfigError(
                f"a learner was about to rewind to {rewind.checkpoint}, and only Redis knows whether it did; start "
                "the learner again, or name a checkpoint"
            )
        return later

    def _usable(self, rewind: RunRewind | None) -> list[Path]:
        """The finished checkpoints that the run has not abandoned, newest first."""
        if rewind is None:
            return self.newest_first()
        target = Path(rewind.checkpoint)
        is_ours = target.parent == self.folder.absolute()
        later = [path for path in self.newest_first() if _term_of(path) >= rewind.term]
        earlier = [path for path in self.newest_first() if is_ours and path.name < target.name]
        return [*later, *([self.folder / target.name if is_ours else target] if target.is_dir() else []), *earlier]

    def _is_usable(self, name: str, rewind: RunRewind | None) -> bool:
        """Whether the run has not abandoned the checkpoint of this name."""
        if rewind is None or _term_of(Path(name)) >= rewind.term:
            return True
        target = Path(rewind.checkpoint)
        return target.parent == self.folder.absolute() and name <= target.name

    def _resumed_from(self, newest_first: list[Path]) -> Path | None:
        """The checkpoint that the newest readable one was resumed from, if `resume` has named one."""
        for path in newest_first:
            with suppress(CheckpointDamaged):
                resumed_from = read_state(path).resumed_from
                return Path(resumed_from).absolute() if resumed_from else None
        return None

    def oldest_step(self) -> int:
        """The lowest step of a finished checkpoint: the run cannot be rewound further. 0 without one."""
        return min((int(path.name.split("-")[3]) for path in self.newest_first()), default=0)

    def newest_term(self) -> int:
        """The highest term that has finished a checkpoint; 0 without one."""
        uploaded = [] if self.uploads is None else [Path(name) for name in self.uploads.newest_first()]
        return max((_term_of(path) for path in (*self.newest_first(), *uploaded)), default=0)

    def of_version(self, policy_version: int) -> Path | None:
        """The newest readable checkpoint that holds the weights of a version, or None."""
        for path in self.newest_first():
            with suppress(CheckpointDamaged):
                if read_state(path).policy_version == policy_version:
                    return path
        return None

    def newest_first(self) -> list[Path]:
        """The finished checkpoints. They may be damaged: saving.py verifies them."""
        finished = (path for path in self.folder.glob("term-*-step-*") if path.suffix != ".partial")
        return sorted(finished, reverse=True)


def _term_of(path: Path) -> int:
    return int(path.name.split("-")[1])


REWIND_FILE = "rewind.json"


def record_rewind(folder: Path, term: int, rewind: RunRewind | None, *, is_done: bool) -> None:
    """Write the file, or remove it if the run was never rewound. A file of a term later than `term` stays. Blocks."""
    with suppress(CheckpointDamaged):
        known, _ = read_rewind(folder)
        if known is not None and known.term > term:
            return
    file = folder / REWIND_FILE
    try:
        if rewind is None:
            file.unlink(missing_ok=True)
            return
        # The run's folder may be moved or mounted elsewhere, so its own checkpoints are stored by their names.
        path = Path(rewind.checkpoint)
        checkpoint = path.name if path.parent == folder.absolute() else str(path)
        partial = folder / f"{REWIND_FILE}.partial"
        folder.mkdir(parents=True, exist_ok=True)
        with partial.open("w") as writing:
            json.dump({"checkpoint": checkpoint, "term": rewind.term, "is_done": is_done}, writing)
        flush(partial)
        partial.rename(file)
        flush(folder)
    except OSError as error:
        raise Unavailable(f"{file} cannot be written ({error.strerror}); start the learner again") from error


def read_rewind(folder: Path) -> tuple[RunRewind | None, bool]:
    """The recorded rewind, and whether it is done: otherwise a learner was about to rewind, and Redis may not have it.
    None without a file. Raises CheckpointDamaged. Blocks."""
    file = folder / REWIND_FILE
    try:
        record = json.loads(file.read_text())
        checkpoint = folder.absolute() / str(record["checkpoint"])
        return RunRewind(str(checkpoint), int(record["term"]), num_orders=0), bool(record["is_done"])
    except FileNotFoundError:
        return None, False
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointDamaged(f"{file} is damaged ({error}); start the learner, which writes it again") from error


def verify_in_this_process(path: Path) -> None:
    """Compare every file with the manifest, without ranks. Raises CheckpointDamaged. Blocks."""
    raise_if_damaged(find_damage(path, read_manifest(path)))


def first_intact(checkpoints: Iterable[Path]) -> tuple[Path | None, list[str]]:
    """The first checkpoint without damage, or None, and the names and damages of those before it. Blocks."""
    damaged: list[str] = []
    for path in checkpoints:
        try:
            verify_in_this_process(path)
            return path, damaged
        except CheckpointDamaged as error:
            damaged.append(f"{path.name} ({error})")
    return None, damaged


def raise_if_damaged(damages: list[str]) -> None:
    if damages:
        more = f" (and {len(damages) - 1} more files)" if len(damages) > 1 else ""
        raise CheckpointDamaged(damages[0] + more)
