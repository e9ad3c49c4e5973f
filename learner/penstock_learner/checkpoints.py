"""Checkpoints: model, optimizer, ledger, step and version as one unit, in the run's folder and in object storage.

All ranks of the trained roles write their shards to `term-T-step-N.partial` (DCP). The controller adds `trainer.json`
and `manifest.json`, flushes the folder and renames it to `term-T-step-N`. Only a renamed folder counts. Groups are
acknowledged after the rename, and after the upload if there is one, never before. The term comes first in the name, so
a checkpoint of a learner that was fenced off never looks newer than its successor's.

`manifest.json` has two lines: the files with the checksums of their pieces as JSON, and the checksum of that line.
Checksums are made while the files are written, so a save reads nothing back. Pieces of one large file are compared in
parallel, before it is loaded.

    URL/RUN/term-T-step-N/…shards…, trainer.json, and manifest.json last, without which an upload is not complete

With uploads, a checkpoint is durable when it is complete in the store. A learner without the run's folder fetches it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from penstock.config.run import RunConfig
from penstock.errors import CheckpointDamaged, ConfigError, DiskFull, Fenced, Unavailable
from penstock.fetching import ObjectFolder
from penstock.machine import is_disk_full, measure_disk
from penstock.replay.queue_types import RunRewind
from penstock_learner.crash_points import crash_point
from penstock_learner.term import Rewind, TrainerState

if TYPE_CHECKING:
    from penstock_learner.metrics import LearnerMetrics

logger = logging.getLogger(__name__)
PIECE_BYTES = 64 * 2**20
READ_BYTES = 2**18
"""What is read or written at once. It is hashed while it is in the processor's second-level cache."""
_VERIFY_THREADS = 8


@dataclass(frozen=True)
class FileRecord:
    """What a file held when it was written."""

    num_bytes: int
    pieces: tuple[str, ...]
    """The xxh3_128 of each PIECE_BYTES of the file."""

    def __post_init__(self) -> None:
        if len(self.pieces) != -(-self.num_bytes // PIECE_BYTES):
            raise ValueError(f"{len(self.pieces)} checksums of {self.num_bytes} bytes")

    @classmethod
    def of(cls, content: bytes) -> FileRecord:
        checksums = PieceChecksums()
        checksums.add(memoryview(content))
        return checksums.record()

    @classmethod
    def of_file(cls, path: Path) -> FileRecord:
        """Describe the present content of a file. Blocks."""
        num_bytes = path.stat().st_size
        indices = range(-(-num_bytes // PIECE_BYTES))
        return cls(num_bytes, tuple(_read_checksum(path, index) for index in indices))


class PieceChecksums:
    """Computes the record of content that arrives from start to end."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._pieces: list[str] = []
        self._current = xxhash.xxh3_128()

    def add(self, content: memoryview) -> None:
        while content:
            room = PIECE_BYTES - self.num_bytes % PIECE_BYTES
            part, content = content[:room], content[room:]
            self._current.update(part)
            self.num_bytes += len(part)
            if len(part) == room:
                self._pieces.append(self._current.hexdigest())
                self._current.reset()

    def record(self) -> FileRecord:
        last = [self._current.hexdigest()] if self.num_bytes % PIECE_BYTES else []
        return FileRecord(self.num_bytes, (*self._pieces, *last))


def find_damage(folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
    """Read the files and compare them with their records. Returns a phrase for each damaged one. Blocks."""
    pieces = [(name, index) for name, record in sorted(files.items()) for index in range(max(1, len(record.pieces)))]
    damages: dict[str, str] = {}
    with ThreadPoolExecutor(_VERIFY_THREADS, thread_name_prefix="verify") as pool:
        found = pool.map(lambda piece: _damage(folder / piece[0], files[piece[0]], piece[1]), pieces)
        for (name, _), damage in zip(pieces, found, strict=True):
            if damage:
                damages.setdefault(name, damage)
    return list(damages.values())


def _damage(path: Path, expected: FileRecord, index: int) -> str:
    """What is wrong with a file or with one of its pieces, or an empty text."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes != expected.num_bytes:
            return f"{path} is truncated or changed: expected {expected.num_bytes} bytes, found {num_bytes}"
        checksum = _read_checksum(path, index) if num_bytes else ""
    except FileNotFoundError:
        return f"{path} is missing: expected {expected.num_bytes} bytes"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    if num_bytes and checksum != expected.pieces[index]:
        start = index * PIECE_BYTES
        return f"{path} is damaged: expected checksum {expected.pieces[index]}, found {checksum} from byte {start} on"
    return ""


def _read_checksum(path: Path, index: int) -> str:
    checksum, left = xxhash.xxh3_128(), PIECE_BYTES
    buffer = memoryview(bytearray(min(READ_BYTES, PIECE_BYTES)))
    with path.open("rb", buffering=0) as file:
        file.seek(index * PIECE_BYTES)
        while left and (num_bytes := file.readinto(buffer[: min(left, len(buffer))])):
            checksum.update(buffer[:num_bytes])
            left -= num_bytes
    return checksum.hexdigest()


def flush(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk. Blocks."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


MANIFEST_FILE = "manifest.json"


def write_manifest(folder: Path, known: Mapping[str, FileRecord]) -> None:
    """Describe every file of the folder. The files whose records are `known` are not read again. Raises
    CheckpointDamaged if one of them is missing or has another size. Does not flush the manifest to disk."""
    found = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    for name, record in known.items():
        if found.get(name) != record.num_bytes:
            raise CheckpointDamaged(
                f"{folder / name} was not written completely: expected {record.num_bytes} bytes, found "
                f"{found.get(name, 'no file')}; is the disk full?"
            )
    files = {name: known.get(name) or FileRecord.of_file(folder / name) for name in sorted(found)}
    line = json.dumps({name: asdict(file) for name, file in files.items()}).encode()
    (folder / MANIFEST_FILE).write_bytes(line + b"\n" + xxhash.xxh3_128_hexdigest(line).encode() + b"\n")


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """The files of a checkpoint. Raises CheckpointDamaged if the manifest is missing or damaged."""
    path = folder / MANIFEST_FILE
    try:
        line, checksum, rest = path.read_bytes().split(b"\n")
        found = xxhash.xxh3_128_hexdigest(line)
        if found.encode() != checksum or rest:
            raise CheckpointDamaged(f"{path} is damaged: expected checksum {checksum.decode()}, found {found}")
        files = json.loads(line)
        return {name: FileRecord(int(file["num_bytes"]), tuple(file["pieces"])) for name, file in files.items()}
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{path} is missing") from error
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise CheckpointDamaged(
            f"{path} is damaged: expected a line of files and its checksum, found {error}"
        ) from error


TRAINER_FILE = "trainer.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.*", "merges.txt", "added_tokens.json", "*.tiktoken")


def tokenizer_digest(model_path: Path) -> str:
    """A digest of the files that say which text a token id means. Chat templates are not among them. Blocks."""
    digest = hashlib.sha256()
    for file in sorted(found for pattern in TOKENIZER_FILES for found in model_path.glob(pattern)):
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def read_state(path: Path) -> TrainerState:
    """The trainer state of a finished checkpoint. Raises CheckpointDamaged if its file or manifest is damaged."""
    # Ranks import this file too. The client of Redis, which they do not use, would cost each 0.3 s of CPU time.
    from penstock.store.redis_client import read_known_fields

    file = path / TRAINER_FILE
    try:
        content = file.read_bytes()
        expected, found = read_manifest(path).get(TRAINER_FILE), FileRecord.of(content)
        if found != expected:
            raise CheckpointDamaged(f"{file} is damaged: expected {expected}, found {found}")
        state = read_known_fields(TrainerState, json.loads(content))
        ranges = [(int(a), int(b)) for a, b in state.ledger]
        lineage: Any = state.lineage
        return replace(state, ledger=ranges, lineage=tuple(read_known_fields(Rewind, fields) for fields in lineage))
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{file} is missing") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(f"{file} is damaged ({error})") from error


UPLOAD_FIELD = "learner.checkpoint.upload"
_UPLOAD_THREADS = 4
ABANDONED_AFTER_S = 86_400.0
"""Age of a folder of a fetch from which on it belongs to a learner that crashed, and is removed."""
_NAME = re.compile(r"^term-\d{6,}-step-\d{8,}$")


@dataclass(eq=False)
class CheckpointUploads:
    """The uploaded checkpoints of one run. All methods block."""

    store: ObjectFolder
    keep: int
    metrics: LearnerMetrics | None = None
    abandoned: threading.Event = field(default_factory=threading.Event)
    """Set to end an upload between two files."""
    _damaged: set[str] = field(default_factory=set)
    """Checkpoints that arrived damaged, and are not fetched again."""

    @classmethod
    def of(cls, config: RunConfig, metrics: LearnerMetrics | None = None) -> CheckpointUploads | None:
        checkpoint = config.learner.checkpoint
        if not checkpoint.upload:
            return None
        url = f"{checkpoint.upload.rstrip('/')}/{config.run}"
        store = ObjectFolder(url, UPLOAD_FIELD, checkpoint.upload_timeout_s)
        if metrics is not None:
            store.on_failure = metrics.upload_failures.inc
        return cls(store, checkpoint.keep_uploaded, metrics)

    def newest_first(self) -> list[str]:
        return sorted((name for name, files in self._list().items() if MANIFEST_FILE in files), reverse=True)

    def upload(self, checkpoint: Path, is_usable: Callable[[str], bool]) -> None:
        """Upload a finished checkpoint, unless the store has it, then remove all but `keep` usable ones."""
        self.abandoned.clear()
        if checkpoint.name in self.newest_first():
            return
        started = time.monotonic()
        files = sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())
        with ThreadPoolExecutor(_UPLOAD_THREADS, thread_name_prefix="upload") as pool:
            list(pool.map(lambda name: self._put(checkpoint, name), [name for name in files if name != MANIFEST_FILE]))
        crash_point("mid_upload")
        self._put(checkpoint, MANIFEST_FILE)
        crash_point("after_upload")
        logger.info("uploaded %s to %s", checkpoint.name, self.store.url)
        if self.metrics is not None:
            self.metrics.upload_seconds.observe(time.monotonic() - started)
            self.metrics.upload_success.set_to_current_time()
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
            with ThreadPoolExecutor(_UPLOAD_THREADS, thread_name_prefix="fetch") as pool:
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
        with suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > ABANDONED_AFTER_S:
                shutil.rmtree(left, ignore_errors=True)


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
                raise Fenced(f"{partial} was removed because another learner has taken over; stop this one") from error
            if not is_disk_full(error, partial):
                raise
            shutil.rmtree(partial, ignore_errors=True)
            space = measure_disk(self.folder)
            raise DiskFull(
                f"no space is left to write {partial.with_suffix('').name} ({space}); free space there, lower "
                "learner.checkpoint.keep, or move run_dir, then start the learner again; it continues from its last "
                "checkpoint, and no group is lost"
            ) from error

    def finish(self, partial: Path, state: TrainerState, shards: Mapping[str, FileRecord] | None = None) -> Path:
        """Make the checkpoint durable, then remove old ones. Its groups may be acknowledged afterwards. Blocks.
        `shards` describes the files that the ranks have written; other files are read."""
        final = partial.with_suffix("")
        with self.writing(partial):
            trainer = json.dumps(asdict(replace(state, tokenizer=self.tokenizer))).encode()
            (partial / TRAINER_FILE).write_bytes(trainer)
            write_manifest(partial, {**(shards or {}), TRAINER_FILE: FileRecord.of(trainer)})
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
        """The finished checkpoints. They may be damaged: whoever loads one verifies it."""
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
    """The first checkpoint without damage, or None, and the names and damages of the ones before it. Blocks."""
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
