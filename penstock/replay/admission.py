"""Admission: how many prompts may be in flight. It is one formula over the queue's counters.

A prompt is admitted only while `trained + queued + in_flight < (max_staleness + step + 1) · groups_per_step`. Groups
beyond that could only be trained more than `max_staleness` steps after the policy they start with. Expired, discarded
and dead-lettered groups are in none of the three terms, so each makes room for another.

The same limiter can be read as a rate limiter with one sample per insert: the difference
`accepted - step · groups_per_step` between what was admitted and what the steps have used stays within
`[0, (max_staleness + 1) · groups_per_step]`. At the upper bound producers wait; at 0 the learner waits.

lease.lua applies the same formula in its atomic call. Tests compare the two.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Admission:
    """Limits of admission at one moment."""

    limit: int
    """Upper bound on trained + queued + in-flight groups."""
    room: int
    """How many more prompts may be admitted now."""
    difference: int
    """Admitted groups minus the groups that the steps so far have used."""
    max_difference: int
    """Difference at which producers wait. The learner waits at 0."""


def admission(
    *, step: int, trained: int, queued: int, in_flight: int, max_staleness: int, groups_per_step: int
) -> Admission:
    """Compute the limits. Example: with two groups a step, staleness 1, nothing trained and one prompt in flight, the
    limit is four prompts, so three more may be admitted.

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
