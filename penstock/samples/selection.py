"""Choosing samples: which ones, and in which order."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from penstock.errors import InvalidInput
from penstock.samples.files import Place, groups_newest_first
from penstock.samples.sample import Sample, samples_of

Order = Literal["newest", "worst", "best"]
_KNUTH = 2654435761


def is_sampled(prompt_id: int, share: float) -> bool:
    """Whether the group of this prompt is among the `share` that is written. A repeated step writes the same groups."""
    return prompt_id * _KNUTH % 2**32 < share * 2**32


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included. None: no bound."""

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

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise InvalidInput("pattern", f"{self.pattern!r} is not a regular expression: {error}") from error

    def matches(self, sample: Sample) -> bool:
        return (
            sample.step in self.steps
            and (self.prompt_id is None or sample.prompt_id == self.prompt_id)
            and (not self.data_source or sample.data_source == self.data_source)
            and (self.rewards == Range() or (sample.reward is not None and sample.reward in self.rewards))
            and sample.num_tokens in self.lengths
            and sample.max_version in Range(low=self.versions.low)
            and sample.min_version in Range(high=self.versions.high)
            and any(self.text in text and re.search(self.pattern, text) for text in (sample.prompt, sample.response))
        )


@dataclass(frozen=True)
class SamplePage:
    samples: list[Sample]
    next_place: Place | None
    """Where the next page starts; None if there is none."""


def matching(folder: Path, wanted: SampleFilter, after: Place | None = None) -> Iterator[tuple[Place, list[Sample]]]:
    """Every group in the range of steps, newest first, with those of its samples that match: perhaps none."""
    for place, line in groups_newest_first(folder, after):
        if wanted.steps.low is not None and line["step"] < wanted.steps.low:
            return  # steps never increase
        yield place, [sample for sample in samples_of(line) if wanted.matches(sample)]


def select(
    folder: Path, wanted: SampleFilter, limit: int, order: Order = "newest", max_groups: int | None = None
) -> list[Sample]:
    """Up to `limit` samples of the newest `max_groups` groups (None: of all). Among equal rewards, the newest come
    first."""
    found = (sample for _, samples in islice(matching(folder, wanted), max_groups) for sample in samples)
    if order == "newest":
        return list(islice(found, limit))
    scored = (sample for sample in found if sample.reward is not None)
    choose = heapq.nsmallest if order == "worst" else heapq.nlargest
    return choose(limit, scored, key=lambda sample: sample.reward or 0.0)


def page(folder: Path, wanted: SampleFilter, limit: int, after: Place | None, max_groups: int) -> SamplePage:
    """One page of samples, newest first, of whole groups: it may have a few more than `limit`. It looks at no more
    than `max_groups` groups, so it may be short or empty and still have a next page."""
    samples: list[Sample] = []
    for number, (place, found) in enumerate(matching(folder, wanted, after), 1):
        samples += found
        if len(samples) >= limit or number >= max_groups:
            return SamplePage(samples, place)
    return SamplePage(samples, None)
