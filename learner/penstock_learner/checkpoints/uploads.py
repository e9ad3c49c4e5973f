"""Checkpoints in object storage: each one is uploaded once it is written, and fetched by a learner without a folder.

    URL/RUN/term-T-step-N/…shards…, trainer.json, and manifest.json last, without which a checkpoint is not complete

With uploads, a checkpoint is durable when it is complete in the store, so groups are acknowledged only then. A learner
looks into the store each time it chooses a checkpoint, also after it has taken its term.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from penstock.config.run import RunConfig
from penstock.errors import CheckpointDamaged, Unavailable
from penstock.fetching import ObjectFolder
from penstock_learner.checkpoint_files import MANIFEST_FILE, find_damage, flush, read_manifest
from penstock_learner.crash_points import crash_point

logger = logging.getLogger(__name__)
FIELD = "learner.checkpoint.upload"
NUM_THREADS = 4
ABANDONED_AFTER_S = 86_400.0
"""Age of a folder of a fetch from which on it belongs to a learner that crashed, and is removed."""
_NAME = re.compile(r"^term-\d{6,}-step-\d{8,}$")


@dataclass(eq=False)
class CheckpointUploads:
    """The uploaded checkpoints of one run. All methods block."""

    store: ObjectFolder
    keep: int
    abandoned: threading.Event = field(default_factory=threading.Event)
    """Set to end an upload between two files."""
    _damaged: set[str] = field(default_factory=set)
    """Checkpoints that arrived damaged, and are not fetched again."""

    @classmethod
    def of(cls, config: RunConfig) -> CheckpointUploads | None:
        checkpoint = config.learner.checkpoint
        if not checkpoint.upload:
            return None
        url = f"{checkpoint.upload.rstrip('/')}/{config.run}"
        return cls(ObjectFolder(url, FIELD, checkpoint.upload_timeout_s), checkpoint.keep_uploaded)

    def newest_first(self) -> list[str]:
        return sorted((name for name, files in self._list().items() if MANIFEST_FILE in files), reverse=True)

    def upload(self, checkpoint: Path, is_usable: Callable[[str], bool]) -> None:
        """Upload a finished checkpoint, unless the store has it, then remove all but `keep` usable ones."""
        self.abandoned.clear()
        if checkpoint.name in self.newest_first():
            return
        files = sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="upload") as pool:
            list(pool.map(lambda name: self._put(checkpoint, name), [name for name in files if name != MANIFEST_FILE]))
        crash_point("mid_upload")
        self._put(checkpoint, MANIFEST_FILE)
        crash_point("after_upload")
        logger.info("uploaded %s to %s", checkpoint.name, self.store.url)
        self._remove_old(checkpoint.name, is_usable)

    def fetch_newest(self, folder: Path, is_usable: Callable[[str], bool]) -> None:
        """Fetch the newest usable checkpoint into `folder`, if that has none as new. A damaged one is skipped."""
        here = max((path.name for path in folder.glob("term-*-step-*") if _NAME.match(path.name)), default="")
        newer = [name for name in self.newest_first() if name > here and name not in self._damaged]
        for name in filter(is_usable, newer):
            try:
                self._fetch(name, folder)
                return
            except CheckpointDamaged as error:
                logger.error("%s/%s cannot be used: %s", self.store.url, name, error)
                self._damaged.add(name)

    def _put(self, checkpoint: Path, name: str) -> None:
        if self.abandoned.is_set():
            raise Unavailable(f"the upload of {checkpoint.name} was abandoned")
        self.store.upload(checkpoint / name, f"{checkpoint.name}/{name}")

    def _fetch(self, name: str, folder: Path) -> None:
        """Download a checkpoint, compare it with its manifest, and only then give it its name. Each fetch has its own
        folder, and the rename is atomic. So concurrent fetches cannot tear a checkpoint: the last finds that it exists,
        and uses that."""
        logger.info("fetching %s from %s", name, self.store.url)
        _remove_abandoned(folder)
        partial = folder / f"fetch-{name}-{secrets.token_hex(4)}"
        partial.mkdir(parents=True)
        try:
            (partial / MANIFEST_FILE).write_bytes(self.store.read(f"{name}/{MANIFEST_FILE}"))
            records = read_manifest(partial)
            sizes = {file: record.num_bytes for file, record in records.items()}
            self._compare_sizes(name, sizes)
            with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="fetch") as pool:
                list(pool.map(lambda file: self.store.download(f"{name}/{file}", partial / file, sizes[file]), sizes))
            if damages := find_damage(partial, records):
                raise CheckpointDamaged(damages[0])
            for path in (*partial.rglob("*"), partial):
                flush(path)
            try:
                partial.rename(folder / name)
            except OSError:
                if not (folder / name).is_dir():
                    raise
            flush(folder)
        except FileNotFoundError as error:
            raise CheckpointDamaged(f"an object is missing ({error})") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _compare_sizes(self, name: str, sizes: Mapping[str, int]) -> None:
        """Raise CheckpointDamaged if an object is missing or has another size, before anything large is downloaded."""
        stored = self.store.list()
        for file, num_bytes in sizes.items():
            found = stored.get(f"{name}/{file}")
            if found is None or found.num_bytes != num_bytes:
                size = "no object" if found is None else f"{found.num_bytes} bytes"
                raise CheckpointDamaged(f"{name}/{file} is damaged: expected {num_bytes} bytes, found {size}")

    def _remove_old(self, newest: str, is_usable: Callable[[str], bool]) -> None:
        """Remove complete checkpoints that are not kept, and incomplete ones that a crash has left."""
        found = self._list()
        complete = sorted((name for name, files in found.items() if MANIFEST_FILE in files), reverse=True)
        kept = [name for name in complete if is_usable(name)][: self.keep]
        for name, files in found.items():
            if name in kept or (name not in complete and name >= newest):
                continue
            for file in sorted(files, key=lambda file: file != MANIFEST_FILE):
                self.store.remove(f"{name}/{file}")

    def _list(self) -> dict[str, set[str]]:
        checkpoints: dict[str, set[str]] = {}
        for path in self.store.list():
            name, _, file = path.partition("/")
            if _NAME.match(name):
                checkpoints.setdefault(name, set()).add(file)
        return checkpoints


def _remove_abandoned(folder: Path) -> None:
    """Remove what crashed fetches have left. A folder that another learner may still be filling stays."""
    for left in folder.glob("fetch-*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > ABANDONED_AFTER_S:
                shutil.rmtree(left, ignore_errors=True)
