"""Trained samples, and the files that a learner would write of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.samples.files import SampleFile
from penstock.samples.sample import Sample, line_of

SAMPLE = Sample(
    step=1, policy_version=1, prompt_id=7, sample=0, data_source="other", prompt="<|user|>2 + 3?", ground_truth="5",
    response="The sum is 5.", reward=1.0, reward_parts={"format": 0.5}, num_tokens=6, min_version=0, max_version=1,
    finish_reason="stop", is_baseline=False, server_id="rollout-0", agent_name="single_turn_agent", attempt=1,
    finished_at_ms=1_790_000_000_000,
)  # fmt: skip


def group_of_samples(step: int, prompt_id: int, *rewards: float, **changes: Any) -> list[Sample]:
    made = replace(SAMPLE, step=step, policy_version=step, prompt_id=prompt_id, **changes)
    return [replace(made, sample=number, reward=reward) for number, reward in enumerate(rewards or (1.0,))]


def write_samples(folder: Path, *groups: list[Sample], resume_step: int = 0, max_bytes: int = 0) -> None:
    """As a learner that starts from `resume_step`."""
    file = SampleFile(folder, max_bytes)
    file.begin(resume_step)
    for group in groups:
        file.write([line_of(group)])
