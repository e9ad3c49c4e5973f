"""`weights.delta: auto`: the faster kind of push is used, and the other one is tried again from time to time."""

from __future__ import annotations

import pytest

from penstock_learner.weights.publisher import DeltaChoice

MEMBERS = ["a", "b"]


def push(choice: DeltaChoice, delta_s: float, whole_s: float, transport: str = "gloo") -> bool:
    """Push once. Returns whether a delta was sent."""
    is_delta = choice.takes_delta(transport, MEMBERS)
    choice.record(transport, MEMBERS, delta_s if is_delta else whole_s, tried_delta=is_delta)
    return is_delta


@pytest.mark.parametrize(("delta_s", "whole_s", "is_delta"), [(1.0, 2.0, True), (2.0, 1.0, False)])
def test_each_kind_is_tried_once_and_then_the_faster_one_is_used(
    delta_s: float, whole_s: float, is_delta: bool
) -> None:
    choice = DeltaChoice()
    choice.record("gloo", MEMBERS, 100.0, tried_delta=False)  # makes the connections, and counts for nothing
    assert [push(choice, delta_s, whole_s) for _ in range(2)] == [True, False]
    assert [push(choice, delta_s, whole_s) for _ in range(20)] == [is_delta] * 20


def test_trying_the_slower_kind_again_costs_two_percent_of_the_time() -> None:
    choice = DeltaChoice()
    for _ in range(3):
        push(choice, 1.0, 10.0)
    kinds = [push(choice, 1.0, 10.0) for _ in range(5000)]
    num_whole = kinds.count(False)
    assert 5 <= num_whole <= 10
    assert num_whole * 10.0 <= 0.021 * sum(1.0 if is_delta else 10.0 for is_delta in kinds)


def test_a_change_of_the_share_that_changes_is_followed() -> None:
    choice = DeltaChoice()
    for _ in range(10):
        push(choice, 1.0, 2.0)
    assert [push(choice, 5.0, 2.0) for _ in range(5)][-1] is False
    later = [push(choice, 1.0, 2.0) for _ in range(1000)]
    assert later[-1] is True, "deltas that became fast again are found"


@pytest.mark.parametrize("transport", ["shm", "cuda_ipc", "snapshot"])
def test_transports_inside_a_machine_send_no_deltas(transport: str) -> None:
    assert not DeltaChoice().takes_delta(transport, MEMBERS)


def test_other_members_are_measured_again() -> None:
    choice = DeltaChoice()
    for _ in range(5):
        push(choice, 2.0, 1.0)
    assert not choice.takes_delta("gloo", MEMBERS)
    assert choice.takes_delta("gloo", [*MEMBERS, "c"])
