"""The files `samples.jsonl` and `samples.1.jsonl` of a run: one line for each trained group, the oldest first.

The learner writes them and everybody else only reads. When `samples.jsonl` has reached half of the limit, it replaces
`samples.1.jsonl` and a new file begins, so that both together stay below the limit.

A learner that starts from a checkpoint first writes a line with `resumed_from_step`. Groups of later steps that are
above this line were given up and are trained again, so readers leave them out. A line that a crash has cut off is left
out too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

NEWEST, OLDER = "samples.jsonl", "samples.1.jsonl"
READ_BYTES = 1 << 20


class SampleFile:
    """Appends lines. A `max_bytes` of 0 means that there is no limit."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    def begin(self, step: int) -> None:
        """Call it once before the first line: what follows was trained from the state of `step` on."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._append(json.dumps({"resumed_from_step": step}) + "\n")

    def write(self, lines: Iterable[dict[str, Any]]) -> None:
        """Append the lines in one piece."""
        self._append("".join(json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n" for line in lines))

    def _append(self, text: str) -> None:
        path = self.folder / NEWEST
        # A line that a crash or a full disk has cut off must not become one with the next line.
        start = "\n" if path.is_file() and not _ends_with_newline(path) else ""
        # A text may hold half of a surrogate pair, which UTF-8 has no bytes for.
        with path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(start + text)
        if self.max_bytes and path.stat().st_size >= self.max_bytes / 2:
            path.replace(self.folder / OLDER)


@dataclass(frozen=True)
class Place:
    """Where a reader is: before the line that begins at `offset` of the file with this `inode`.

    A file keeps its inode when it is renamed, so a place stays valid while the learner writes."""

    inode: int
    offset: int
    last_step: int | None
    """Later steps were given up. None: no step was."""

    def __str__(self) -> str:
        return f"{self.inode}.{self.offset}.{'' if self.last_step is None else self.last_step}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """Raises ValueError."""
        inode, offset, last_step = text.split(".")
        return cls(int(inode), int(offset), int(last_step) if last_step else None)


def has_samples(folder: Path) -> bool:
    return (folder / NEWEST).is_file() or (folder / OLDER).is_file()


def groups_newest_first(folder: Path, after: Place | None = None) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The lines of the groups, each with its place. Steps never increase. With `after`, it continues behind that
    place, or yields nothing if the place is no longer kept."""
    last_step = after.last_step if after else None
    seen: set[int] = set()
    for name in (NEWEST, OLDER):
        try:
            file = (folder / name).open("rb")
        except FileNotFoundError:
            continue
        with file:
            inode, end = os.fstat(file.fileno()).st_ino, file.seek(0, os.SEEK_END)
            if inode in seen:
                continue  # the learner renamed it after it was read
            seen.add(inode)
            if after is not None:
                if inode != after.inode:
                    continue
                end = min(end, after.offset)
                after = None
            for offset, line in _lines_backwards(file, end):
                record = _parsed(line)
                if "resumed_from_step" in record:
                    resumed = int(record["resumed_from_step"])
                    last_step = resumed if last_step is None else min(last_step, resumed)
                elif "samples" in record and (last_step is None or record["step"] <= last_step):
                    yield Place(inode, offset, last_step), record


def _parsed(line: bytes) -> dict[str, Any]:
    """The line's object, or an empty one for a line that was cut off."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _lines_backwards(file: BinaryIO, end: int) -> Iterator[tuple[int, bytes]]:
    """The lines before `end`, the last one first, each with the offset at which it begins."""
    rest, position = b"", end
    while position > 0:
        size = min(READ_BYTES, position)
        position -= size
        file.seek(position)
        rest, *lines = (file.read(size) + rest).split(b"\n")
        offset = position + len(rest) + sum(len(line) + 1 for line in lines)
        for line in reversed(lines):
            offset -= len(line)
            if line:
                yield offset, line
            offset -= 1
    if rest:
        yield 0, rest


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
