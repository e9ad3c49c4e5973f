"""The files `samples.jsonl` and `samples.1.jsonl` of a run: one line for each trained group, the oldest first. The
folder `validation` has such files of held-out groups.

Only the learner writes them. When `samples.jsonl` has reached half of the limit, it replaces `samples.1.jsonl`. A
learner that starts from a checkpoint first writes a line with `resumed_from_step`: groups of later steps above it were
abandoned, so readers skip them, and lines that a crash has cut off too.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

from penstock.errors import InvalidInput
from penstock.store.ownership import RUN_ITSELF, Owner
from penstock.v1 import groups_pb2


@dataclass(frozen=True)
class Sample:
    """A response that was trained, or scored in a validation. The REST interface answers with the same fields."""

    step: int
    policy_version: int
    """The version that the step made; the newest one that answered the validation."""
    prompt_id: int
    sample: int
    """Number of the sample in its group, from 0."""
    data_source: str
    prompt: str
    """The prompt as the model saw it, with the special tokens of the chat template."""
    ground_truth: Any
    response: str
    """Without special tokens, as rewards see it."""
    reward: float | None
    """The reward that it was trained with. None if that was not a finite number."""
    reward_parts: dict[str, float | None]
    num_tokens: int
    """Tokens of the response."""
    min_version: int
    """The oldest version that sampled a token of the response."""
    max_version: int
    finish_reason: str
    is_baseline: bool
    """Whether this is the greedy sample that the others of its group are compared with, which is not trained."""
    server_id: str
    agent_name: str
    attempt: int
    finished_at_ms: int
    reward_failed: bool = False
    """Whether the reward function failed, so that `reward` is `rollout.reward.error_value`."""
    owner: str = ""
    """Owner of the prompt."""
    validation: str = ""
    """Name of the validation, without its step. Empty if the sample was trained."""


SAMPLE_FIELDS = (
    "sample", "response", "reward", "reward_parts", "num_tokens", "min_version", "max_version", "finish_reason",
    "is_baseline", "reward_failed",
)  # fmt: skip
"""Fields that differ between the samples of a group. The line of a group has the others once."""
_ALL_FIELDS = tuple(field.name for field in fields(Sample))


def line_of(group: list[Sample]) -> dict[str, Any]:
    """The line of one group, whose samples are given in order."""
    first = asdict(group[0])
    shared = {name: first[name] for name in _ALL_FIELDS if name not in SAMPLE_FIELDS}
    return shared | {"samples": [{name: getattr(each, name) for name in SAMPLE_FIELDS} for each in group]}


def samples_of(line: Mapping[str, Any]) -> Iterator[Sample]:
    """The samples of a line. Fields that a newer version has added are ignored, and fields that an older one lacks have
    their defaults."""
    for own in line["samples"]:
        values = {**line, **own}
        yield Sample(**{name: values[name] for name in _ALL_FIELDS if name in values})


NEWEST, OLDER = "samples.jsonl", "samples.1.jsonl"
VALIDATED = "validation"
"""Folder of the run with the files of its validations."""
READ_BYTES = 1 << 20


class SampleFile:
    """Appends lines. A `max_bytes` of 0 means that there is no limit."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    def begin(self, step: int) -> None:
        """Call it once before the first line: what follows was trained from the state of `step` on."""
        self._append(json.dumps({"resumed_from_step": step}) + "\n")

    def write(self, lines: Iterable[dict[str, Any]]) -> None:
        """Append the lines in one piece."""
        self._append("".join(json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n" for line in lines))

    def _append(self, text: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / NEWEST
        # A line that a crash or a full disk has cut off must not become one with the next line.
        start = ""
        if path.is_file():
            with path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                start = "" if file.read(1) in (b"", b"\n") else "\n"
        # A text may hold half of a surrogate pair, which UTF-8 has no bytes for.
        with path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(start + text)
        if self.max_bytes and path.stat().st_size >= self.max_bytes / 2:
            path.replace(self.folder / OLDER)


@dataclass(frozen=True)
class Place:
    """Where a reader is: before the line at `offset` of the file with this `inode`, which a renamed file keeps."""

    inode: int
    offset: int
    last_step: int | None
    """Later steps were abandoned. None if no step was abandoned."""

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
    """The lines of the groups, each with its place. Steps of trained groups never increase. With `after`, it continues
    behind that place, or yields nothing if the place is no longer kept."""
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
    with contextlib.suppress(ValueError):
        if isinstance(record := json.loads(line), dict):
            return record
    return {}


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


Order = Literal["newest", "worst", "best"]
_KNUTH = 2654435761


def is_sampled(prompt_id: int, share: float) -> bool:
    """Whether the group of this prompt is among the `share` that is written. A repeated step writes the same groups."""
    return prompt_id * _KNUTH % 2**32 < share * 2**32


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included. None means no bound."""

    low: float | None = None
    high: float | None = None

    def __contains__(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    @classmethod
    def parse(cls, text: str) -> Range:
        """`7` is one number; `3:7`, `3:` and `:7` are ranges. Raises ValueError."""
        low, colon, high = text.partition(":")
        if not colon:
            return cls(float(low), float(low))
        return cls(float(low) if low else None, float(high) if high else None)


@dataclass(frozen=True)
class SampleFilter:
    """A sample is chosen if it is within every range and has every text."""

    steps: Range = Range()
    rewards: Range = Range()
    lengths: Range = Range()
    """Tokens of the response."""
    versions: Range = Range()
    """At least one token of the response was sampled by a version of this range."""
    data_source: str = ""
    prompt_id: int | None = None
    text: str = ""
    """Text that the prompt or the response contains."""
    pattern: str = ""
    """Regular expression that is found in the prompt or the response."""
    owner: Owner = RUN_ITSELF
    """Only samples that it may use."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise InvalidInput("pattern", f"{self.pattern!r} is not a regular expression: {error}") from error

    def matches(self, sample: Sample) -> bool:
        return (
            sample.step in self.steps
            and self.owner.may_use(sample.owner)
            and (self.prompt_id is None or sample.prompt_id == self.prompt_id)
            and (not self.data_source or sample.data_source == self.data_source)
            and (self.rewards == Range() or (sample.reward is not None and sample.reward in self.rewards))
            and sample.num_tokens in self.lengths
            and sample.max_version in Range(low=self.versions.low)
            and sample.min_version in Range(high=self.versions.high)
            and any(self.text in text and re.search(self.pattern, text) for text in (sample.prompt, sample.response))
        )


@dataclass(frozen=True)
class SamplesFound:
    samples: list[Sample]
    next_place: Place | None
    """Where the next page starts; None if there is none."""


def matching(folder: Path, wanted: SampleFilter, after: Place | None = None) -> Iterator[tuple[Place, list[Sample]]]:
    """Every group in the range of steps, newest first, with its samples that match: perhaps none."""
    for place, line in groups_newest_first(folder, after):
        if wanted.steps.low is not None and line["step"] < wanted.steps.low and not line.get("validation"):
            return  # steps never increase
        yield place, [sample for sample in samples_of(line) if wanted.matches(sample)]


def select(
    folder: Path, wanted: SampleFilter, limit: int, order: Order = "newest", max_groups: int | None = None
) -> list[Sample]:
    """Up to `limit` samples of the newest `max_groups` groups (all if None), the newest first among equal rewards."""
    found = (sample for _, samples in islice(matching(folder, wanted), max_groups) for sample in samples)
    if order == "newest":
        return list(islice(found, limit))
    scored = (sample for sample in found if sample.reward is not None)
    choose = heapq.nsmallest if order == "worst" else heapq.nlargest
    return choose(limit, scored, key=lambda sample: sample.reward or 0.0)


def page(folder: Path, wanted: SampleFilter, limit: int, after: Place | None, max_groups: int) -> SamplesFound:
    """One page of samples, newest first, of whole groups: it may have a few more than `limit`. It looks at no more
    than `max_groups` groups, so it may be short or empty and still have a next page."""
    samples: list[Sample] = []
    for number, (place, found) in enumerate(matching(folder, wanted, after), 1):
        samples += found
        if len(samples) >= limit or number >= max_groups:
            return SamplesFound(samples, place)
    return SamplesFound(samples, None)


logger = logging.getLogger(__name__)


class TokenText:
    """Decodes tokens for people to read. A process may have no model folder: without a tokenizer, ids are shown."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, model_path: Path) -> TokenText:
        path = model_path / "tokenizer.json"
        try:
            from tokenizers import Tokenizer

            if path.is_file():
                return cls(Tokenizer.from_file(str(path)))
            logger.info("%s does not exist: tokens are shown without text", path)
        except Exception as error:  # tokenizers raises a bare Exception for a file that it does not understand
            logger.warning("%s cannot be used (%s): tokens are shown without text", path, error)
        return cls(None)

    @property
    def is_known(self) -> bool:
        return self._tokenizer is not None

    def fill(self, group: groups_pb2.Group, token_ids: Sequence[Sequence[int]]) -> None:
        """Add the text and the tokens to each trajectory, if there is a tokenizer. `token_ids` has the ids of each."""
        if self._tokenizer is None:
            return
        for trajectory, ids in zip(group.trajectories, token_ids, strict=True):
            trajectory.text = self.text(ids)
            trajectory.tokens[:] = self.tokens(ids)

    def text(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text of all tokens together, with special tokens or without. Without a tokenizer, the ids."""
        if self._tokenizer is None:
            return " ".join(map(str, token_ids))
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=not special)
        return text

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token, or its id if there is no tokenizer."""
        if self._tokenizer is None:
            return [f"token_id:{token}" for token in token_ids]
        return [self._tokenizer.decode([token], skip_special_tokens=False) for token in token_ids]
