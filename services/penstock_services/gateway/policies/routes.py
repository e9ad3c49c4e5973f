"""REST routes of policies."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import JSONResponse, Response

from penstock.v1 import policies_pb2
from penstock_services.gateway.policies import bodies
from penstock_services.gateway.policies.handlers import PolicyHandlers
from penstock_services.gateway.routing import PageSize, add_routes, event_stream, policy_version_of, run_name


class PolicyRoutes:
    def __init__(self, handlers: PolicyHandlers) -> None:
        self.handlers = handlers

    def router(self) -> APIRouter:
        policies = "/v1/runs/{run}/policies"
        return add_routes(
            "policies",
            ("GET", policies, self.list_policies),
            ("GET", f"{policies}:watch", self.watch_policies),
            ("GET", f"{policies}:compare", self.compare_policies),
            ("POST", f"{policies}:release", self.release_policy),
            ("POST", f"{policies}/{{policy_version}}:promote", self.promote_policy),
            ("POST", f"{policies}/{{policy_version}}:rollback", self.roll_back_policy),
            ("POST", f"{policies}/{{policy_version}}:retire", self.retire_policy),
            ("GET", f"{policies}/{{policy_version}}", self.get_policy),
            ("PUT", "/v1/runs/{run}/pins/{pin}", self.pin_policy),
            ("DELETE", "/v1/runs/{run}/pins/{pin}", self.unpin_policy),
        )

    async def list_policies(self, run: str, page_size: PageSize = 0, page_token: str = "") -> Response:
        """Newest first."""
        request = policies_pb2.ListPoliciesRequest(
            run=run_name(run), page_size=max(page_size, -1), page_token=page_token
        )
        return JSONResponse(bodies.policies_to_json(await self.handlers.list_policies(request)))

    async def get_policy(self, run: str, policy_version: str) -> Response:
        """A version by number, or `latest`."""
        request = policies_pb2.GetPolicyRequest(run=run_name(run), policy_version=policy_version_of(policy_version))
        return JSONResponse(bodies.policy_to_json(await self.handlers.get_policy(request)))

    async def watch_policies(self, run: str) -> Response:
        """Server-sent events: the current policy, and again whenever it changes."""
        policies = await self.handlers.watch_policies(policies_pb2.WatchPoliciesRequest(run=run_name(run)))
        return event_stream("policy", policies, bodies.policy_to_json, lambda policy: str(policy.policy_version))

    async def compare_policies(
        self, run: str, policy_version: Annotated[int, Query(ge=0, lt=2**63)],
        other_version: Annotated[int, Query(ge=0, lt=2**63)],
    ) -> Response:  # fmt: skip
        request = policies_pb2.ComparePoliciesRequest(
            run=run_name(run), policy_version=policy_version, other_version=other_version
        )
        return JSONResponse(bodies.comparison_to_json(await self.handlers.compare_policies(request)))

    async def promote_policy(self, run: str, policy_version: str) -> Response:
        """Mark the version that is meant for use; its snapshot is kept."""
        request = await self._change(run, policy_version)
        return JSONResponse(bodies.policy_to_json(await self.handlers.promote_policy(request)))

    async def roll_back_policy(self, run: str, policy_version: str) -> Response:
        """Hold every rollout server at this version, from its snapshot, until `policies:release`."""
        request = await self._change(run, policy_version)
        return JSONResponse(bodies.policy_to_json(await self.handlers.roll_back_policy(request)))

    async def retire_policy(self, run: str, policy_version: str) -> Response:
        request = await self._change(run, policy_version)
        return JSONResponse(bodies.policy_to_json(await self.handlers.retire_policy(request)))

    async def release_policy(self, run: str) -> Response:
        """End a roll back."""
        request = policies_pb2.ReleasePolicyRequest(run=run_name(run))
        return JSONResponse(bodies.policy_to_json(await self.handlers.release_policy(request)))

    async def pin_policy(self, run: str, pin: str, body: bodies.PinPolicyBody) -> Response:
        """A key, a session or an evaluation of this name is answered by the version only; a server stays at it."""
        request = policies_pb2.PinPolicyRequest(run=run_name(run), pin=pin, policy_version=body.policy_version)
        return JSONResponse(bodies.policy_to_json(await self.handlers.pin_policy(request)))

    async def unpin_policy(self, run: str, pin: str) -> Response:
        answer = await self.handlers.unpin_policy(policies_pb2.UnpinPolicyRequest(run=run_name(run), pin=pin))
        return JSONResponse({"was_pinned": answer.was_pinned})

    async def _change(self, run: str, text: str) -> policies_pb2.ChangePolicyRequest:
        version = policy_version_of(text)
        if version is None:
            latest = await self.handlers.get_policy(policies_pb2.GetPolicyRequest(run=run_name(run)))
            version = latest.policy_version
        return policies_pb2.ChangePolicyRequest(run=run_name(run), policy_version=version)
