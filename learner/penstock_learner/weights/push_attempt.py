"""One attempt to bring a version to a fixed set of members: open, announce, send, commit.

    open ──► announce ──all ready──► send, bucket by bucket ──► commit
                 │                          │
                 └───── a member failed ────┴──► abort: nobody has committed, and the publisher may try again

No member or publisher enters a collective before every member has answered the announcement. Every call and every
collective has a deadline. Sending, hashing and the commit share one: each gets what is left of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.errors import TrainingDiverged, WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights.deadline import Deadline
from penstock.weights.manifest import wire_sizes
from penstock_learner.weights.member_calls import MemberCalls
from penstock_learner.weights.push_report import PushReport
from penstock_learner.weights.senders.sender import PushTarget, Sender, Shipment, num_ranks


@dataclass(frozen=True)
class AttemptOutcome:
    failed: dict[str, str] = field(default_factory=dict)
    """Members that must leave the push, each with the reason."""
    needs_full: bool = False
    """A member does not have the base of the delta."""

    @property
    def is_success(self) -> bool:
        return not self.failed and not self.needs_full


@dataclass(frozen=True)
class PushAttempt:
    """One attempt to push a shipment to a fixed set of members. Call `run` once."""

    shipment: Shipment
    members: Sequence[PushTarget]
    sender: Sender
    calls: MemberCalls
    timeout_s: float
    """Deadline from the first bucket to the last commit."""
    report: PushReport
    """The attempt adds its durations, and after a commit its results."""

    def run(self) -> AttemptOutcome:
        """Run the phases in order. If a phase before the commit fails, no member has committed.

        Raises TrainingDiverged, and no member has committed, if the version turns out not to be finite."""
        try:
            with self.report.timed("announce"):
                outcome = self._announce(self._open())
            deadline = Deadline(self.timeout_s, "the push")
            if outcome.is_success:
                with self.report.timed("transfer"):
                    outcome = self._send(deadline)
            if not outcome.is_success:
                self._abandon(outcome)
                return outcome
            with self.report.timed("commit"):
                failed = self._commit(deadline)
            self.sender.close(failed=bool(failed))
            if failed:
                self._abort([m for m in self.members if m.server_id in failed], "it did not commit in time")
            return AttemptOutcome(failed)
        except WeightPushFailed as error:
            self.sender.close(failed=True)
            self._abort(self.members, str(error))
            return AttemptOutcome({member.server_id: str(error) for member in self.members})
        except TrainingDiverged as error:
            self.sender.close(failed=True)
            self._abort(self.members, str(error))
            raise

    def _open(self) -> str:
        """Prepare the transfer. Returns the rendezvous, by which the members find the publisher."""
        deadline = Deadline(self.timeout_s, "opening the transfer")
        return self.sender.open(self.shipment, self.members, deadline)

    def _announce(self, rendezvous: str) -> AttemptOutcome:
        """Ask every member to get ready, and wait for all answers."""
        requests, rank = [], 1
        for member in self.members:
            requests.append(
                weights_pb2.AnnounceRequest(
                    manifest=self.shipment.manifest, transport=self.report.transport, rendezvous=rendezvous, rank=rank,
                    world_size=num_ranks(self.members), deadline_s=self.timeout_s,
                )
            )  # fmt: skip
            rank += len(member.devices)
        answers, failed = self.calls.announce(self.members, requests)
        return AttemptOutcome(failed, any(answer.needs_full for answer in answers.values()))

    def _send(self, deadline: Deadline) -> AttemptOutcome:
        """Transfer the buckets.

        If the transfer breaks, it is not known which member broke it. The members that do not answer an abort count as
        failed. If all answer, all leave the push, and are served as late joiners afterwards."""
        try:
            self.sender.send(self.shipment, self.members, deadline)
        except WeightPushFailed as error:
            self.sender.close(failed=True)
            silent = self._abort(self.members, "the transfer broke")
            return AttemptOutcome(silent or {member.server_id: f"transfer: {error}" for member in self.members})
        return AttemptOutcome()

    def _commit(self, deadline: Deadline) -> dict[str, str]:
        """Tell every member to verify, load and serve the version. Returns the members that failed.

        Raises WeightPushFailed, and no member is told to commit, if no time is left."""
        manifest = self.shipment.manifest
        checksums = self.shipment.staged.checksums(deadline)
        deadline.check()
        request = weights_pb2.CommitRequest(
            policy_version=manifest.policy_version,
            term=manifest.term,
            bucket_checksums=checksums,
            deadline_s=deadline.remaining_s,
        )
        responses, failed = self.calls.commit(self.members, request)
        report = self.report
        report.committed = sorted(responses)
        workers = sum(len(member.devices) for member in self.members if member.server_id in responses)
        report.num_bytes = sum(wire_sizes(manifest)) * workers
        report.running_requests = sum(response.running_requests for response in responses.values())
        for phase, values in (
            ("receive", [response.receive_s for response in responses.values()]),
            ("load", [response.load_s for response in responses.values()]),
            ("pause", [response.paused_s for response in responses.values()]),
        ):
            report.seconds[phase] = max(values, default=0.0)
        return failed

    def _abandon(self, outcome: AttemptOutcome) -> None:
        """End an attempt before its commit.

        Members that failed get no abort, because the publisher would have to wait for them again. Such a member may
        have staged the version nevertheless, and may read the buckets until its own deadline."""
        self.sender.close(failed=True)
        if outcome.failed:
            self.shipment.staged.memory.is_reusable = False
        left = [member for member in self.members if member.server_id not in outcome.failed]
        self._abort(left, "the push starts again without a member that failed")

    def _abort(self, members: Sequence[PushTarget], reason: str) -> dict[str, str]:
        """Tell the members to drop the stage. Returns those that did not answer, which may still read the buckets."""
        manifest = self.shipment.manifest
        request = weights_pb2.AbortRequest(policy_version=manifest.policy_version, reason=reason, term=manifest.term)
        silent = self.calls.abort(members, request)
        if silent:
            self.shipment.staged.memory.is_reusable = False
        return silent
