"""One trained sample as text, and the JSON line that holds all samples of a group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Sample:
    """A response that a step trained on, with all that is known about it."""

    step: int
    policy_version: int
    """The version that the step made."""
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
    reward_parts: Mapping[str, float | None]
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
    """The samples of a line. Fields that a newer version has added are ignored, and those that an older one lacks have
    their defaults."""
    for own in line["samples"]:
        values = {**line, **own}
        yield Sample(**{name: values[name] for name in _ALL_FIELDS if name in values})
