"""Which checkpoint a learner continues from, and which are kept."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest

from penstock.errors import ConfigError, DiskFull, Fenced
from penstock.replay.queue_types import RunRewind
from penstock_learner.checkpoints import TRAINER_FILE, CheckpointStore, read_state, record_rewind, write_manifest
from penstock_learner.term import Rewind, TrainerState


def make(store: CheckpointStore, step: int, term: int = 1, resumed_from: str = "") -> Path:
    state = TrainerState(step, step, term, [(1, step)], resumed_from=resumed_from)
    return store.finish(store.partial_folder(step, term), state)


def test_the_newest_is_continued_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3):
        make(store, step)
    assert [read_state(path).step for path in store.candidates("auto")] == [3, 2]
    assert store.candidates("off") == []
    assert len(list(tmp_path.iterdir())) == 2


def test_a_named_checkpoint_is_resumed_once(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=5)
    older = str(make(store, 1))
    make(store, 2)
    assert store.candidates(older) == [Path(older)]
    newest = make(store, 2, term=2, resumed_from=older)
    assert store.candidates(older)[0] == newest, "a restart does not rewind again"


def test_checkpoints_that_the_run_abandoned_are_not_continued(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=5)
    first, target, _ = (make(store, step) for step in (1, 2, 3))
    rewind = RunRewind(str(target), term=2, num_orders=0)
    assert store.candidates("auto", rewind) == [target, first]
    later = make(store, 3, term=2)
    assert store.candidates("auto", rewind) == [later, target, first]
    copied = RunRewind(str(shutil.copytree(target, tmp_path / "copies" / "best")), term=2, num_orders=0)
    assert store.candidates("auto", copied) == [later, Path(copied.checkpoint)]


def test_what_the_run_abandoned_is_known_without_redis(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=5)
    first, target, given_up = (make(store, step) for step in (1, 2, 3))
    rewind = RunRewind(str(target), term=2, num_orders=0)
    assert store.of_the_run() == [given_up, target, first]
    record_rewind(store.folder, 2, rewind, is_done=False)
    with pytest.raises(ConfigError, match="only Redis knows whether it did"):
        store.of_the_run()
    record_rewind(store.folder, 2, rewind, is_done=True)
    record_rewind(store.folder, 1, None, is_done=True)  # by a learner that was suspended meanwhile
    assert store.of_the_run() == [target, first]
    moved = CheckpointStore(store.folder.rename(tmp_path / "moved"), keep=5)
    assert [path.name for path in moved.of_the_run()] == [target.name, first.name]
    later = make(moved, 3, term=3)
    assert moved.of_the_run()[0] == later
    record_rewind(moved.folder, 3, None, is_done=True)  # Redis says that the run was not rewound
    assert [path.name for path in moved.of_the_run()] == [later.name, given_up.name, target.name, first.name]


def test_abandoned_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    """If the first checkpoint after a rewind is damaged, the one that the run was rewound to is still there."""
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    target, _ = (make(store, step) for step in (1, 2))
    store.rewind = RunRewind(str(target), term=2, num_orders=0)
    later = make(store, 2, term=2)
    assert store.newest_first() == [later, target]
    elsewhere = shutil.copytree(target, tmp_path / "best")
    store.rewind = RunRewind(str(elsewhere), term=3, num_orders=0)
    newest = [make(store, step, term=3) for step in (2, 3, 4)][:0:-1]
    assert store.newest_first() == newest and elsewhere.is_dir(), "only the run's own checkpoints are removed"


def test_a_named_checkpoint_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner.checkpoint.resume: .*nothing is not a checkpoint's folder"):
        CheckpointStore(tmp_path, keep=1).candidates(str(tmp_path / "nothing"))


def test_a_checkpoint_of_a_newer_version_is_resumed(tmp_path: Path) -> None:
    """A deployment may be rolled back to the version before. The checkpoint is not damaged then."""
    store = CheckpointStore(tmp_path, keep=5)
    folder = make(store, 1)
    file = folder / TRAINER_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"field_of_tomorrow": [1]}))
    write_manifest(folder, {})
    assert read_state(store.candidates("auto")[0]) == TrainerState(1, 1, 1, [(1, 1)])


def test_the_lineage_is_read_as_rewinds(tmp_path: Path) -> None:
    folder = make(CheckpointStore(tmp_path, keep=5), 1)
    file = folder / TRAINER_FILE
    fields = [
        {"from_version": 3, "to_version": 6, "why": "restart"},
        {"from_version": 4, "to_version": 9, "why": "order"},
    ]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lineage": fields}))
    write_manifest(folder, {})
    assert read_state(folder).lineage == (Rewind(3, 6, "restart"), Rewind(4, 9, "order"))


def test_a_writer_whose_folder_a_successor_cleared_away_is_fenced(tmp_path: Path) -> None:
    """The writer may be suspended at any point. An error while the folder still exists is raised unchanged."""
    store = CheckpointStore(tmp_path, keep=5)
    partial = store.partial_folder(1, term=1)
    with pytest.raises(OSError, match="disk"), store.writing(partial):
        raise OSError("disk")
    make(store, 2, term=2)
    with pytest.raises(Fenced, match="another learner has taken over"), store.writing(partial):
        (partial / "weights").write_text("")
    with pytest.raises(Fenced):
        store.finish(partial, TrainerState(1, 1, 1, [(1, 1)]))


@pytest.mark.parametrize("is_full", [True, False])
def test_a_checkpoint_without_space_is_one_line_and_leaves_no_partial_folder(tmp_path: Path, is_full: bool) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.finish(store.partial_folder(1, 1), TrainerState(1, 1, 1))
    partial = store.partial_folder(2, 1)
    (partial / "shard").write_bytes(b"half of it")
    error = OSError(errno.ENOSPC if is_full else errno.EIO, "No space left on device" if is_full else "I/O error")
    with pytest.raises(DiskFull if is_full else OSError) as raised, store.writing(partial):
        raise error
    assert partial.exists() != is_full
    if is_full:
        assert "no space is left to write term-000001-step-00000002" in str(raised.value)
        assert "\n" not in str(raised.value)
    assert [path.name for path in store.newest_first()] == ["term-000001-step-00000001"]
