"""Checkpoints in an object store: complete or not there, newest first, damaged ones found."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.config.loading import validate
from penstock.errors import ConfigError, Unavailable
from penstock.fetching import ObjectFolder
from penstock.replay.queue_types import RunRewind
from penstock_learner.checkpoints import (
    UPLOAD_FIELD,
    CheckpointStore,
    CheckpointUploads,
    read_state,
    verify_in_this_process,
)
from penstock_learner.loop.step_loop import CheckpointWriter
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.term import Term, TrainerState
from support.object_store import ObjectStore, in_environment, object_store

URL = "s3://bucket/runs"


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as store, in_environment(store):
        yield store


@pytest.fixture
def empty(store: ObjectStore) -> ObjectStore:
    for key in store.list_keys():
        store.remove(key)
    return store


def checkpoints_in(folder: Path, keep: int = 5, keep_uploaded: int = 2) -> CheckpointStore:
    return CheckpointStore(folder, keep, CheckpointUploads(ObjectFolder(f"{URL}/one", UPLOAD_FIELD, 2), keep_uploaded))


def write(checkpoints: CheckpointStore, step: int, term: int = 1) -> Path:
    partial = checkpoints.partial_folder(step, term)
    (partial / "shard").write_bytes(bytes([step]) * 1000)
    (partial / "critic").mkdir()
    (partial / "critic" / "shard").write_bytes(b"c" * step)
    return checkpoints.finish(partial, TrainerState(step=step, policy_version=step, term=term))


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_a_learner_without_its_folder_gets_the_newest_checkpoint_and_as_many_are_kept_as_configured(
    empty: ObjectStore, tmp_path: Path
) -> None:
    first = checkpoints_in(tmp_path / "a")
    for step in (1, 2, 3):
        first.upload(write(first, step))
    assert {key.split("/")[2] for key in empty.list_keys()} == {
        "term-000001-step-00000002",
        "term-000001-step-00000003",
    }

    second = checkpoints_in(tmp_path / "b")
    assert second.candidates("off") == []
    assert names(second.candidates("auto")) == ["term-000001-step-00000003"]
    fetched = tmp_path / "b" / "term-000001-step-00000003"
    assert read_state(fetched).step == 3 and (fetched / "critic" / "shard").read_bytes() == b"ccc"
    assert second.newest_term() == 1
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["term-000001-step-00000003"]

    newer = write(second, 4, term=2)
    second.upload(newer)
    assert first.candidates("auto")[0].name == newer.name, "a folder that is older gets it, too"


def test_only_an_upload_with_its_manifest_counts(
    empty: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = checkpoints_in(tmp_path / "a")
    first.upload(write(first, 1))
    upload = ObjectFolder.upload

    def dies_before_the_manifest(self: ObjectFolder, file: Path, name: str) -> None:
        if name.endswith("manifest.json"):
            raise KeyboardInterrupt
        upload(self, file, name)

    second = write(first, 2)
    with monkeypatch.context() as patch:
        patch.setattr(ObjectFolder, "upload", dies_before_the_manifest)
        with pytest.raises(KeyboardInterrupt):
            first.upload(second)
    assert any("step-00000002" in key for key in empty.list_keys())
    assert names(checkpoints_in(tmp_path / "b").candidates("auto")) == ["term-000001-step-00000001"]

    first.upload(write(first, 3))
    assert not any("step-00000002" in key for key in empty.list_keys()), "what a crash has left is removed"


@pytest.mark.parametrize(
    "damage", ["changed", *(pytest.param(name, marks=pytest.mark.long) for name in ("cut", "missing", "manifest"))]
)
def test_a_damaged_object_is_found_and_the_checkpoint_before_is_fetched(
    damage: str, empty: ObjectStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = checkpoints_in(tmp_path / "a")
    for step in (1, 2):
        first.upload(write(first, step))
    key = f"runs/one/term-000001-step-00000002/{'manifest.json' if damage == 'manifest' else 'shard'}"
    content = empty.get(key)
    if damage == "missing":
        empty.remove(key)
    else:
        empty.put(key, content[:500] if damage == "cut" else b"x" + content[1:])
    second = checkpoints_in(tmp_path / "b")
    assert names(second.candidates("auto")) == ["term-000001-step-00000001"]
    assert "term-000001-step-00000002 cannot be used" in caplog.text
    assert names(second.candidates("auto")) == ["term-000001-step-00000001"]
    assert caplog.text.count("fetching term-000001-step-00000002") <= 1, "it is not fetched again"


def test_two_that_fetch_into_one_folder_never_tear_it(
    empty: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = checkpoints_in(tmp_path / "a")
    first.upload(write(first, 1))
    folder = tmp_path / "b"
    folder.mkdir()
    for name, age_s in (("fetch-of-a-crash", 3 * 86_400), ("fetch-that-runs", 60)):
        (folder / name).mkdir()
        os.utime(folder / name, (time.time() - age_s, time.time() - age_s))
    both, read = Barrier(2, timeout=30), ObjectFolder.read

    def at_the_same_time(self: ObjectFolder, name: str, *part: int) -> bytes:
        if not part:  # the manifest; files are read in parts
            both.wait()
        return read(self, name, *part)

    monkeypatch.setattr(ObjectFolder, "read", at_the_same_time)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: checkpoints_in(folder).candidates("auto"), range(2)))
    assert [names(each) for each in found] == [["term-000001-step-00000001"]] * 2
    verify_in_this_process(found[0][0])
    assert sorted(path.name for path in folder.iterdir()) == ["fetch-that-runs", "term-000001-step-00000001"]
    assert "cannot be used" not in caplog.text


def test_checkpoints_that_the_run_abandoned_are_not_fetched(empty: ObjectStore, tmp_path: Path) -> None:
    first = checkpoints_in(tmp_path / "a", keep_uploaded=5)
    for step in (1, 2, 3):
        first.upload(write(first, step))
    second = checkpoints_in(tmp_path / "b")
    rewind = RunRewind(str((tmp_path / "b" / "term-000001-step-00000002").absolute()), term=2, num_orders=0)
    assert names(second.candidates("auto", rewind)) == ["term-000001-step-00000002"]


def test_an_upload_that_is_abandoned_ends_between_files_and_a_wrong_url_is_refused(
    empty: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = checkpoints_in(tmp_path / "a")
    checkpoint = write(first, 1)
    upload = ObjectFolder.upload
    monkeypatch.setattr(ObjectFolder, "upload", lambda *words: (upload(*words), first.abandon_upload())[0])
    with pytest.raises(Unavailable, match="was abandoned"):
        first.upload(checkpoint)
    assert first.uploads is not None and first.uploads.newest_first() == []
    with pytest.raises(ConfigError, match=r"learner\.checkpoint\.upload: s3://nowhere/one does not exist"):
        CheckpointUploads(ObjectFolder("s3://nowhere/one", UPLOAD_FIELD, 2), 2).newest_first()
    with pytest.raises(ConfigError, match="is not a URL that fsspec knows"):
        ObjectFolder("other://x", UPLOAD_FIELD)


def test_metrics_say_how_uploads_go(empty: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    settings = {"run": "one", "model": {"path": "m"}, "learner": {"checkpoint": {"upload": URL}}}
    uploads = CheckpointUploads.of(validate(settings, "test"), LearnerMetrics(registry, "standalone"))
    assert uploads is not None
    store = CheckpointStore(tmp_path / "a", 5, uploads)

    def measured(name: str) -> float | None:
        return registry.get_sample_value(f"penstock_checkpoint_upload_{name}")

    assert [measured(name) for name in ("failures_total", "last_success_timestamp_seconds")] == [0, 0]
    put, failures = uploads.store._fs.put_file, [OSError("reset"), PermissionError("no")]

    def fails_at_first(*words: str) -> None:
        if failures:
            raise failures.pop()
        put(*words)

    monkeypatch.setattr(uploads.store._fs, "put_file", fails_at_first)
    with pytest.raises(ConfigError, match="refuses to upload"):
        store.upload(write(store, 1))
    assert measured("failures_total") and not measured("last_success_timestamp_seconds")
    store.upload(write(store, 2))
    assert measured("failures_total") == 2 and measured("duration_seconds_count") == 1
    assert measured("last_success_timestamp_seconds")
    store.upload(tmp_path / "a" / "term-000001-step-00000002")
    assert measured("duration_seconds_count") == 1, "the store had it already"


class Commits:
    """A queue that remembers which checkpoints the store had, complete, at each commit."""

    def __init__(self, uploads: CheckpointUploads) -> None:
        self.uploads = uploads
        self.seen: list[list[str]] = []

    async def commit(self, step: int, prompt_ids: list[int], kept_after: int) -> None:
        self.seen.append(self.uploads.newest_first())


async def test_groups_are_acknowledged_only_when_the_upload_is_complete(
    empty: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = checkpoints_in(tmp_path / "a")
    assert store.uploads is not None
    queue: Any = Commits(store.uploads)
    metrics = LearnerMetrics(CollectorRegistry(), "standalone")
    term = Term()
    writer = CheckpointWriter(store, queue, {}, metrics, term, on_durable=lambda: None)
    term.add_trained(1, [1], kl_reference=0.0, num_sequences=1)
    await writer.begin(TrainerState(1, 1, 1, [(1, 1)]), [1])
    await writer.wait_until_written()
    assert queue.seen == [["term-000001-step-00000001"]] and term.ledger.is_durable(1)

    def fails(self: ObjectFolder, file: Path, name: str) -> None:
        raise Unavailable("the store is away")

    monkeypatch.setattr(ObjectFolder, "upload", fails)
    term.add_trained(2, [2], kl_reference=0.0, num_sequences=1)
    await writer.begin(TrainerState(2, 2, 1, [(1, 2)]), [2])
    with pytest.raises(Unavailable, match="the store is away"):
        await writer.wait_until_written()
    assert len(queue.seen) == 1 and not term.ledger.is_durable(2), "what is only on this disk acknowledges nothing"
    assert names(store.newest_first())[0] == "term-000001-step-00000002", "it is still here for the next start"
