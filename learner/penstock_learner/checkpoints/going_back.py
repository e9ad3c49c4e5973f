"""`going-back.json`, beside the checkpoints: a copy of what Redis knows about the last time that the run went back.

Commands that work without Redis, such as `penstock export`, read it to leave out the checkpoints that were given up. A
learner writes it before it goes back, and again when Redis has the change: in between nobody can tell which checkpoints
count.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import CheckpointDamaged, Unavailable
from penstock.replay.queue_types import GoneBack
from penstock_learner.checkpoint_files import flush

GOING_BACK_FILE = "going-back.json"


@dataclass(frozen=True)
class GoingBack:
    """The content of the file."""

    gone_back: GoneBack
    is_done: bool
    """Whether Redis has the change. Otherwise a learner was about to go back."""


def record_going_back(folder: Path, term: int, gone_back: GoneBack | None, *, is_done: bool) -> None:
    """Write the file, or remove it if the run never went back. `term` is the learner's own: the file of a later term
    stays as it is. Blocks."""
    with suppress(CheckpointDamaged):
        known = read_going_back(folder)
        if known is not None and known.gone_back.term > term:
            return
    file = folder / GOING_BACK_FILE
    try:
        if gone_back is None:
            file.unlink(missing_ok=True)
            return
        # The run's folder may be moved or mounted elsewhere, so its own checkpoints are stored by their names.
        path = Path(gone_back.checkpoint)
        checkpoint = path.name if path.parent == folder.absolute() else str(path)
        partial = folder / f"{GOING_BACK_FILE}.partial"
        folder.mkdir(parents=True, exist_ok=True)
        with partial.open("w") as writing:
            json.dump({"checkpoint": checkpoint, "term": gone_back.term, "is_done": is_done}, writing)
        flush(partial)
        partial.rename(file)
        flush(folder)
    except OSError as error:
        raise Unavailable(f"{file} cannot be written ({error.strerror}); start the learner again") from error


def read_going_back(folder: Path) -> GoingBack | None:
    """The content of the file, or None without one. Raises CheckpointDamaged. Blocks."""
    file = folder / GOING_BACK_FILE
    try:
        record = json.loads(file.read_text())
        checkpoint = folder.absolute() / str(record["checkpoint"])
        return GoingBack(GoneBack(str(checkpoint), int(record["term"]), num_roll_backs=0), bool(record["is_done"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointDamaged(f"{file} is damaged ({error}); start the learner, which writes it again") from error
