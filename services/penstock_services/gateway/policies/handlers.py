"""Policy versions: reading them, and what operators decide about them. Each answer names the version's servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from penstock.config.run import RunConfig
from penstock.errors import Conflict, InvalidInput
from penstock.store.fleet import SERVING_STATES, Fleet
from penstock.store.policies import PolicyRegistry
from penstock.store.run_control import RunControl
from penstock.v1 import policies_pb2
from penstock_services.gateway import validation
from penstock_services.gateway.operations import AuditLog, operation
from penstock_services.gateway.policies.current_policy import CurrentPolicy

MAX_NAMED_VERSIONS = 10


class PolicyHandlers:
    def __init__(
        self, config: RunConfig, audit: AuditLog, policies: PolicyRegistry, fleet: Fleet, control: RunControl,
        stopping: asyncio.Event,
    ) -> None:  # fmt: skip
        self.config = config
        self.audit = audit
        self.policies = policies
        self.fleet = fleet
        self.control = control
        self.current = CurrentPolicy(lambda: self._policy(None), 2 * config.redis.timeout_s, stopping)

    @operation("read")
    async def list_policies(self, request: policies_pb2.ListPoliciesRequest) -> policies_pb2.ListPoliciesResponse:
        page_size = validation.checked_page_size(request.page_size)
        before = validation.decode_page_token("policies", request.page_token)
        found = await self.policies.newest_first(None if before is None else int(before), page_size + 1)
        page = found[:page_size]
        await self._complete(page)
        has_more = len(found) > page_size
        token = validation.encode_page_token("policies", page[-1].policy_version) if has_more else ""
        return policies_pb2.ListPoliciesResponse(policies=page, next_page_token=token)

    @operation("read")
    async def get_policy(self, request: policies_pb2.GetPolicyRequest) -> policies_pb2.Policy:
        return await self._policy(request.policy_version if request.HasField("policy_version") else None)

    @operation("read")
    async def watch_policies(self, request: policies_pb2.WatchPoliciesRequest) -> AsyncIterator[policies_pb2.Policy]:
        del request
        return self.current.changes()

    @operation("read")
    async def compare_policies(self, request: policies_pb2.ComparePoliciesRequest) -> policies_pb2.PolicyComparison:
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

    @operation("admin")
    async def promote_policy(self, request: policies_pb2.ChangePolicyRequest) -> policies_pb2.Policy:
        policy = await self._usable(request.policy_version)
        if not policy.snapshot_path and policy.policy_version != (await self._policy(None)).policy_version:
            raise Conflict(
                f"version {policy.policy_version} has no snapshot, and its weights are gone; promote one that has one"
                f"{await self._kept()}, or the newest version, whose snapshot the learner then makes"
            )
        await self.policies.promote(request.policy_version)
        return await self._policy(request.policy_version)

    @operation("admin")
    async def roll_back_policy(self, request: policies_pb2.ChangePolicyRequest) -> policies_pb2.Policy:
        policy = await self._loadable(request.policy_version)
        await self.control.hold(policy.policy_version)
        return await self._policy(policy.policy_version)

    @operation("admin")
    async def release_policy(self, request: policies_pb2.ReleasePolicyRequest) -> policies_pb2.Policy:
        del request
        await self.control.release()
        return await self._policy(None)

    @operation("admin")
    async def pin_policy(self, request: policies_pb2.PinPolicyRequest) -> policies_pb2.Policy:
        validation.check_name("pin", request.pin)
        is_server = any(server.server_id == request.pin for server in await self.fleet.servers())
        await (self._loadable if is_server else self._usable)(request.policy_version)
        await self.policies.pin(request.pin, request.policy_version)
        return await self._policy(request.policy_version)

    @operation("admin")
    async def unpin_policy(self, request: policies_pb2.UnpinPolicyRequest) -> policies_pb2.UnpinPolicyResponse:
        validation.check_name("pin", request.pin)
        return policies_pb2.UnpinPolicyResponse(was_pinned=await self.policies.unpin(request.pin))

    @operation("admin")
    async def retire_policy(self, request: policies_pb2.ChangePolicyRequest) -> policies_pb2.Policy:
        policy = await self._policy(request.policy_version)
        if policy.state == policies_pb2.Policy.PROMOTED or policy.is_held or policy.pins:
            raise Conflict(
                f"version {policy.policy_version} is in use; promote another version, or release or unpin this one"
            )
        await self.policies.retire(policy.policy_version)
        return await self._policy(policy.policy_version)

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

    async def _complete(self, policies: list[policies_pb2.Policy]) -> None:
        """Add the operators' marks and the servers of each version.

        A server counts while it is in a serving state and its heartbeat is no older than `replay.lease_ttl_s`."""
        await self.policies.add_marks(policies)
        silence_ms = 1000 * self.config.replay.lease_ttl_s
        servers = await self.fleet.servers()
        serving = [s for s in servers if s.state in SERVING_STATES and s.heartbeat_age_ms <= silence_ms]
        for policy in policies:
            policy.server_ids[:] = [s.server_id for s in serving if s.policy_version == policy.policy_version]
