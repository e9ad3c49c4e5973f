"""Recordings of a queue: what a row of the file keeps of a group."""

from __future__ import annotations

from dataclasses import fields, replace

from penstock.trajectory import TokenReward, Trajectory
from penstock_tools.recordings.recording import TRAJECTORY, RecordedGroup, from_record_batch, to_record_batch
from support.groups import made_by


def test_every_stored_field_of_a_sample_but_the_experts_is_recorded() -> None:
    """A sample whose token rewards were lost would be trained on other advantages."""
    assert {field.name for field in TRAJECTORY} == {field.name for field in fields(Trajectory)} - {
        "answer", "routed_experts",
    }  # fmt: skip
    made = made_by(1, 0)
    sample = replace(
        made.trajectories[0], reward_failed=True, token_rewards=(TokenReward(0, 0.25),), server_ids=("a", "b"),
    )  # fmt: skip
    group = replace(made, trajectories=(sample, *made.trajectories[1:]))
    (read,) = from_record_batch(to_record_batch([RecordedGroup(group, b"")]))
    found = [(one.reward_failed, one.token_rewards, one.server_ids) for one in read.group.trajectories]
    assert found == [(one.reward_failed, one.token_rewards, one.server_ids) for one in group.trajectories]
