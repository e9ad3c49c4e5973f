"""Sending, hashing and the commit of a push share one deadline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.v1 import weights_pb2
from penstock.weights import transports
from penstock.weights.transports import Deadline
from penstock_learner.weights.publisher import attempt
from penstock_learner.weights.senders import PushReport, PushTarget, Shipment

TIMEOUT_S = 20.0


@dataclass
class Push:
    """A clock, and a sender, members and hashes that take time by it."""

    send_s: float
    hash_s: float = 0.0
    now_s: float = 1000.0
    commits: list[float] = field(default_factory=list)
    """Deadlines of the commits that members were told to make."""

    def open(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> str:
        return "here"

    def send(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> None:
        assert deadline.remaining_s == TIMEOUT_S
        self.now_s += self.send_s

    def close(self, *, failed: bool) -> None:
        pass

    def checksums(self, deadline: Deadline) -> list[str]:
        self.now_s += self.hash_s
        return []

    def announce(self, members: Sequence[PushTarget], requests: Sequence[Any]) -> tuple[dict[str, Any], dict[str, str]]:
        self.now_s += 7.0  # the time to answer is no part of the deadline
        return {member.server_id: weights_pb2.AnnounceResponse() for member in members}, {}

    def commit(self, members: Sequence[PushTarget], request: Any) -> tuple[dict[str, Any], dict[str, str]]:
        self.commits.append(request.deadline_s)
        return {member.server_id: weights_pb2.CommitResponse() for member in members}, {}

    def abort(self, members: Sequence[PushTarget], request: Any) -> dict[str, str]:
        return {}

    def run(self, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, str], PushReport]:
        monkeypatch.setattr(transports.time, "monotonic", lambda: self.now_s)
        report = PushReport(1)
        itself: Any = self
        shipment: Any = Shipment(weights_pb2.WeightManifest(policy_version=1), itself)
        return attempt(shipment, [PushTarget("a", "")], itself, itself, TIMEOUT_S, report), report


def test_a_commit_has_the_rest_of_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    push = Push(send_s=12.0, hash_s=3.0)
    failed, report = push.run(monkeypatch)
    assert (failed, report.committed, push.commits) == ({}, ["a"], [5.0])


def test_no_member_is_told_to_commit_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    push = Push(send_s=12.0, hash_s=9.0)
    failed, report = push.run(monkeypatch)
    assert failed == {"a": "the push took longer than 20 s; is the other side alive?"}
    assert (report.committed, push.commits) == ([], [])
