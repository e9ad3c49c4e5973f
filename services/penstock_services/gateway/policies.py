"""Policy versions: reading them, and what operators decide about them. Each answer names the version's servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import Message

from penstock.api.records import Int64, Page, Policy, PolicyComparison, PolicyPage, Record, Unpinned
from penstock.cancellation import end_task
from penstock.errors import Conflict, InvalidInput, NotFound, PenstockError
from penstock.store.fleet import SERVING_STATES, Fleet, PolicyRegistry, RunControl
from penstock.store.keys import check_name
from penstock.v1 import policies_pb2
from penstock_services.gateway import checks
from penstock_services.gateway.operations import Handlers, Operation, bounded, operation
from penstock_services.gateway.rest import HttpRequest

MAX_NAMED_VERSIONS = 10
POLL_S = 0.25
"""Pause between two reads. A blocking read would miss changes, because the answer also depends on marks, on the servers
and on the age of their heartbeats."""
LATEST = ("latest", "current")
"""Names of the newest version, wherever REST takes a version."""


class PinPolicy(Record):
    policy_version: Int64


class ComparePolicies(Record):
    policy_version: str
    other_version: str


async def resolve_versions(handlers: PolicyHandlers, http: HttpRequest) -> Message:
    """Read a request whose versions are numbers or the latest one. Only GetPolicy knows the latest one by itself."""
    operation: Operation = http.operation
    given = http.params | (http.read_query(operation.takes).model_dump() if operation.takes else {})
    request = operation.request()
    for name in ("policy_version", "other_version"):
        if name in given and (version := await handlers.number_of(name, given[name], operation)) is not None:
            setattr(request, name, version)
    return request


@dataclass
class PolicyHandlers(Handlers):
    policies: PolicyRegistry
    fleet: Fleet
    control: RunControl
    stopping: asyncio.Event

    def __post_init__(self) -> None:
        self.current = CurrentPolicy(lambda: self._policy(None), self.deadline_s, self.stopping)

    @operation("GET", "policies", "read", PolicyPage, takes=Page)
    async def list_policies(self, request: policies_pb2.ListPoliciesRequest) -> policies_pb2.ListPoliciesResponse:
        """List policy versions, newest first."""
        page_size = checks.page_size(request.page_size)
        before = checks.page_position("policies", request.page_token)
        found = await self.policies.newest_first(None if before is None else int(before), page_size + 1)
        page, token = checks.cut_page("policies", found, page_size, lambda policy: policy.policy_version)
        await self._complete(page)
        return policies_pb2.ListPoliciesResponse(policies=page, next_page_token=token)

    @operation("GET", "policies/{policy_version}", "read", Policy, read=resolve_versions)
    async def get_policy(self, request: policies_pb2.GetPolicyRequest) -> policies_pb2.Policy:
        """Return a version by its number, or the `latest` one."""
        return await self._policy(request.policy_version if request.HasField("policy_version") else None)

    @operation("GET", "policies:watch", "read", Policy, event=("policy", "policy_version"))
    async def watch_policies(self, _: policies_pb2.WatchPoliciesRequest) -> AsyncIterator[policies_pb2.Policy]:
        """Send the current policy, and again whenever it changes."""
        return self.current.changes()

    @operation("GET", "policies:compare", "read", PolicyComparison, takes=ComparePolicies, read=resolve_versions)
    async def compare_policies(self, request: policies_pb2.ComparePoliciesRequest) -> policies_pb2.PolicyComparison:
        """Compare two versions by their metrics and weights. Either may be `latest`."""
        policy, other = await self._policy(request.policy_version), await self._policy(request.other_version)
        return policies_pb2.PolicyComparison(
            policy=policy,
            other=other,
            metric_changes={
                name: other.metrics[name] - value for name, value in policy.metrics.items() if name in other.metrics
            },
            steps_between=other.step - policy.step,
            same_weights=bool(policy.weights_digest) and policy.weights_digest == other.weights_digest,
        )

    @operation("POST", "policies/{policy_version}:promote", "admin", Policy, read=resolve_versions)
    async def promote_policy(self, request: policies_pb2.ChangePolicyRequest) -> policies_pb2.Policy:
        """Mark the version that is meant for use. Its snapshot is kept."""
        policy = await self._usable(request.policy_version)
        if not policy.snapshot_path and policy.policy_version != (await self._policy(None)).policy_version:
            raise Conflict(
                f"version {policy.policy_version} has no snapshot, and its weights no longer exist; promote one that "
                f"has one{await self._kept()}, or the newest version, whose snapshot the learner then makes"
            )
        await self.policies.promote(request.policy_version)
        return await self._policy(request.policy_version)

    @operation("POST", "policies/{policy_version}:rewind", "admin", Policy, read=resolve_versions)
    async def rewind_policy(self, request: policies_pb2.ChangePolicyRequest) -> policies_pb2.Policy:
        """Hold every rollout server at this version, from its snapshot, until `policies:release`."""
        policy = await self._loadable(request.policy_version)
        await self.control.hold(policy.policy_version)
        return await self._policy(policy.policy_version)

    @operation("POST", "policies:release", "admin", Policy)
    async def release_policy(self, _: policies_pb2.ReleasePolicyRequest) -> policies_pb2.Policy:
        """End a rewind: the servers get the newest version again."""
        await self.control.release()
        return await self._policy(None)

    @operation("PUT", "pins/{pin}", "admin", Policy, takes=PinPolicy)
    async def pin_policy(self, request: policies_pb2.PinPolicyRequest) -> policies_pb2.Policy:
        """Pin a key, a session or an evaluation of this name to the version. A server of this name stays at it."""
        check_name("pin", request.pin)
        is_server = any(server.server_id == request.pin for server in await self.fleet.servers())
        await (self._loadable if is_server else self._usable)(request.policy_version)
        await self.policies.pin(request.pin, request.policy_version)
        return await self._policy(request.policy_version)

    @operation("DELETE", "pins/{pin}", "admin", Unpinned)
    async def unpin_policy(self, request: policies_pb2.UnpinPolicyRequest) -> policies_pb2.UnpinPolicyResponse:
        check_name("pin", request.pin)
        return policies_pb2.UnpinPolicyResponse(was_pinned=await self.policies.unpin(request.pin))

    @operation("POST", "policies/{policy_version}:retire", "admin", Policy, read=resolve_versions)
    async def retire_policy(self, request: policies_pb2.ChangePolicyRequest) -> policies_pb2.Policy:
        policy = await self._policy(request.policy_version)
        if policy.state == policies_pb2.Policy.PROMOTED or policy.is_held or policy.pins:
            raise Conflict(
                f"version {policy.policy_version} is in use; promote another version, or release or unpin this one"
            )
        await self.policies.retire(policy.policy_version)
        return await self._policy(policy.policy_version)

    async def number_of(self, field: str, text: str, operation: Operation) -> int | None:
        """The number of a version that REST gives by number or as the latest one. None where absence means that."""
        if text in LATEST:
            return None if operation.name == "get_policy" else (await self._policy(None)).policy_version
        if text.isascii() and text.isdecimal() and len(text) < 19:
            return int(text)
        raise InvalidInput(field, f"must be a version's number, latest or current, not {text!r}")

    async def _usable(self, policy_version: int) -> policies_pb2.Policy:
        policy = await self._policy(policy_version)
        if policy.state == policies_pb2.Policy.RETIRED:
            raise Conflict(f"version {policy_version} is retired; choose another one")
        return policy

    async def _loadable(self, policy_version: int) -> policies_pb2.Policy:
        policy = await self._usable(policy_version)
        if not policy.snapshot_path:
            raise Conflict(
                f"no snapshot of version {policy_version} was kept; choose a version that has one"
                f"{await self._kept()}, or lower weights.snapshot_every_steps"
            )
        return policy

    async def _kept(self) -> str:
        """The versions that have a snapshot, newest first, as ` (450, 400)`. Empty if there are none."""
        versions = sorted(await self.policies.snapshots(), reverse=True)
        more = ", …" if len(versions) > MAX_NAMED_VERSIONS else ""
        return f" ({', '.join(map(str, versions[:MAX_NAMED_VERSIONS]))}{more})" if versions else ""

    async def _policy(self, policy_version: int | None) -> policies_pb2.Policy:
        if policy_version is not None and policy_version < 0:
            raise InvalidInput("policy_version", "must not be negative")
        policy = await self.policies.get(policy_version)
        await self._complete([policy])
        return policy

    async def _complete(self, policies: Sequence[policies_pb2.Policy]) -> None:
        """Add the operators' marks and the servers of each version.

        A server counts while it is in a serving state and its heartbeat is no older than `replay.lease_ttl_s`."""
        await self.policies.add_marks(policies)
        silence_ms = 1000 * self.config.replay.lease_ttl_s
        servers = await self.fleet.servers()
        serving = [s for s in servers if s.state in SERVING_STATES and s.heartbeat_age_ms <= silence_ms]
        for policy in policies:
            policy.server_ids[:] = [s.server_id for s in serving if s.policy_version == policy.policy_version]


@dataclass(eq=False)
class CurrentPolicy:
    """Follows the current policy. A single task polls it while anyone watches."""

    read: Callable[[], Awaitable[policies_pb2.Policy]]
    deadline_s: float
    stopping: asyncio.Event
    _watchers: set[asyncio.Event] = field(default_factory=set)
    _poller: asyncio.Task[None] | None = None
    _policy: bytes = b""
    """Serialized; empty while no version is published."""
    _error: PenstockError | None = None

    async def changes(self) -> AsyncIterator[policies_pb2.Policy]:
        """Yield the current policy, and again whenever anything about it changes, until the gateway stops."""
        seen, woken = b"", asyncio.Event()
        self._watchers.add(woken)
        try:
            while not self.stopping.is_set():
                woken.clear()
                if self._poller is None:
                    self._policy, self._error = b"", None
                    self._poller = asyncio.create_task(self._poll(), name="current policy")
                if self._policy not in (b"", seen):
                    seen = self._policy
                    yield policies_pb2.Policy.FromString(seen)
                await woken.wait()
                if self._error is not None:
                    raise self._error
        finally:
            self._watchers.discard(woken)

    async def close(self) -> None:
        if self._poller is not None:
            await end_task(self._poller)

    async def _poll(self) -> None:
        try:
            while self._watchers and not self.stopping.is_set():
                policy = await self._read()
                if policy != self._policy:
                    self._policy = policy
                    self._wake()
                await asyncio.sleep(POLL_S)
        except PenstockError as error:
            self._error = error
        finally:
            self._poller = None
            self._wake()

    async def _read(self) -> bytes:
        with contextlib.suppress(NotFound):
            policy = await bounded(self.read(), self.deadline_s)
            return policy.SerializeToString(deterministic=True)
        return b""

    def _wake(self) -> None:
        for watcher in self._watchers:
            watcher.set()
