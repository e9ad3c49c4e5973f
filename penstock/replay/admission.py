"""Admission: how many prompts may be on their way, as one formula and its counters.

A prompt is admitted only while `trained + queued + in_flight < (max_staleness + step + 1) · groups_per_step`: groups
beyond that could only be trained more than `max_staleness` steps after the policy they start with. Expired, discarded
and dead-lettered groups are in none of the three, so each makes room for another.

The same limiter in terms of samples per insert: each group is trained once, so the ratio of the flows is 1, and their
difference `accepted - step · groups_per_step` (what was let in, less what the steps have used) stays within
`[0, (max_staleness + 1) · groups_per_step]`. At the upper bound producers wait; at the lower one the learner does.

lease.lua holds the same formula, where it is applied in one atomic call; tests hold the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Admission:
    """What the limiter says at one moment."""

    limit: int
    """What trained, queued and in flight may add up to."""
    room: int
    """How many more prompts may be admitted now."""
    difference: int
    """Accepted groups less those that the steps so far have used."""
    max_difference: int
    """Where producers wait. The learner waits at 0."""


def admission(
    *, step: int, trained: int, queued: int, in_flight: int, max_staleness: int, groups_per_step: int
) -> Admission:
    """Two groups a step, staleness 1, nothing trained yet: four prompts may be on their way, and one of them is.

    >>> admission(step=0, trained=0, queued=0, in_flight=1, max_staleness=1, groups_per_step=2)
    Admission(limit=4, room=3, difference=1, max_difference=4)
    """
    accepted = trained + queued + in_flight
    limit = (max_staleness + step + 1) * groups_per_step
    return Admission(
        limit=limit,
        room=max(0, limit - accepted),
        difference=accepted - step * groups_per_step,
        max_difference=(max_staleness + 1) * groups_per_step,
    )
