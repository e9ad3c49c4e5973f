"""A learner with an empty folder fetches the newest uploaded checkpoint once, before any role starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.config.loading import validate
from penstock.config.run import RunConfig
from penstock.fetching import ObjectFolder
from penstock_learner.checkpoints import CheckpointStore, CheckpointUploads, FileRecord, find_damage
from penstock_learner.loop.process import LearnerController
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.term import TrainerState
from support.memory_queue import MemoryReplayQueue
from support.memory_store import MemoryStore
from support.object_store import ObjectStore, in_environment, object_store

ROLES = ("policy", "critic", "reward_model")


class Restored(Exception):
    """Ends a test's learner when all its trained roles were restored from `folders`."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders


class KeptRole:
    """A role whose ranks an earlier controller left. `events` are those of all roles."""

    num_ranks, is_up = 1, True

    def __init__(self, name: str, events: list[str], restored: list[Path]) -> None:
        self.name = name
        self.events = events
        self.restored = restored

    async def start(self) -> None:
        self.events.append(f"start {self.name}")

    async def adopt(self) -> bool:
        self.events.append(f"adopt {self.name}")
        return True

    async def call_rank(self, rank: int, method: str, checkpoint: Path, files: dict[str, FileRecord]) -> list[str]:
        assert method == "find_damage"
        return find_damage(checkpoint, files)

    async def call_all(self, method: str, folder: Path) -> None:
        assert method == "load_checkpoint"
        self.restored.append(folder)
        if len(self.restored) == 2:
            raise Restored(self.restored)


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    with object_store() as store, in_environment(store):
        yield store


def make_config(folder: Path) -> RunConfig:
    learner = {
        "algorithm": {"advantage": {"name": "gae"}, "kl": {"placement": "none"}},
        "critic": {},
        "reward_model": {"path": str(folder)},
        "checkpoint": {"upload": "s3://bucket/runs"},
    }
    return validate({"run": "one", "run_dir": str(folder), "model": {"path": str(folder)}, "learner": learner}, "test")


def upload_checkpoint(config: RunConfig, folder: Path, step: int) -> None:
    checkpoints = CheckpointStore(folder, 5, CheckpointUploads.of(config))
    partial = checkpoints.partial_folder(step, term=1)
    (partial / "critic").mkdir()
    for number in range(8):
        (partial / f"shard-{number}").write_bytes(bytes([step]) * 10_000)
        (partial / "critic" / f"shard-{number}").write_bytes(bytes([step]) * 10_000)
    checkpoints.upload(checkpoints.finish(partial, TrainerState(step, step, term=1)))


async def test_an_uploaded_checkpoint_is_fetched_once_before_any_role_starts(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path)
    for step in (1, 2):
        upload_checkpoint(config, tmp_path / "lost", step)
    events: list[str] = []
    restored: list[Path] = []
    read = ObjectFolder.read

    def observed(self: ObjectFolder, name: str, *part: int) -> bytes:
        if not part:  # files are read in parts
            events.append(f"fetch {name}")
        return read(self, name, *part)

    monkeypatch.setattr(ObjectFolder, "read", observed)
    roles: Any = {name: KeptRole(name, events, restored) for name in ROLES}
    queue = MemoryReplayQueue(MemoryStore(), config.replay)
    fleet: Any = SimpleNamespace(client=SilentRedis())
    controller = LearnerController(config, queue, fleet, roles, LearnerMetrics(CollectorRegistry(), "standalone"))
    with pytest.raises(Restored):
        await controller.run()

    newest = config.folder / "checkpoints" / "term-000001-step-00000002"
    assert events[0] == f"fetch {newest.name}/manifest.json"
    assert sorted(events[1:]) == sorted(f"adopt {name}" for name in ROLES), "nothing is fetched for a single role"
    assert set(restored) == {newest, newest / "critic"}
    assert sorted(path.name for path in newest.parent.iterdir()) == [newest.name], "no torn folder is left"
    assert "cannot be used" not in caplog.text


class SilentRedis:
    """Accepts the phases of the start."""

    async def evalsha(self, *_: object) -> int:
        return 1
