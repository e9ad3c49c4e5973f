"""REST routes of policies."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import JSONResponse, Response

from penstock.v1 import policies_pb2
from penstock_services.gateway.access import Caller
from penstock_services.gateway.policies import bodies
from penstock_services.gateway.routing import (
    Authenticated,
    PageSize,
    RunOfPath,
    add_routes,
    event_stream,
    policy_version_of,
)
from penstock_services.gateway.served_run import ServedRun

Version = Annotated[str, Query(pattern=r"^([0-9]{1,18}|latest|current)$")]


def router() -> APIRouter:
    policies = "/v1/runs/{run}/policies"
    return add_routes(
        "policies",
        ("GET", policies, list_policies),
        ("GET", f"{policies}:watch", watch_policies),
        ("GET", f"{policies}:compare", compare_policies),
        ("POST", f"{policies}:release", release_policy),
        ("POST", f"{policies}/{{policy_version}}:promote", promote_policy),
        ("POST", f"{policies}/{{policy_version}}:rollback", roll_back_policy),
        ("POST", f"{policies}/{{policy_version}}:retire", retire_policy),
        ("GET", f"{policies}/{{policy_version}}", get_policy),
        ("PUT", "/v1/runs/{run}/pins/{pin}", pin_policy),
        ("DELETE", "/v1/runs/{run}/pins/{pin}", unpin_policy),
    )


async def list_policies(
    run: RunOfPath, caller: Authenticated, page_size: PageSize = 0, page_token: str = ""
) -> Response:
    """List policy versions, newest first."""
    request = policies_pb2.ListPoliciesRequest(run=run.name, page_size=max(page_size, -1), page_token=page_token)
    return JSONResponse(bodies.policies_to_json(await run.policies.list_policies(caller, request)))


async def get_policy(run: RunOfPath, caller: Authenticated, policy_version: str) -> Response:
    """Return a version by its number, or the `latest` one."""
    request = policies_pb2.GetPolicyRequest(run=run.name, policy_version=policy_version_of(policy_version))
    return JSONResponse(bodies.policy_to_json(await run.policies.get_policy(caller, request)))


async def watch_policies(run: RunOfPath, caller: Authenticated) -> Response:
    """Server-sent events with the current policy, sent again whenever it changes."""
    policies = await run.policies.watch_policies(caller, policies_pb2.WatchPoliciesRequest(run=run.name))
    return event_stream("policy", policies, bodies.policy_to_json, lambda policy: str(policy.policy_version))


async def compare_policies(
    run: RunOfPath, caller: Authenticated, policy_version: Version, other_version: Version
) -> Response:
    """Compare two versions by their metrics and weights. Either may be `latest`."""
    request = policies_pb2.ComparePoliciesRequest(
        run=run.name,
        policy_version=await _number(run, caller, policy_version),
        other_version=await _number(run, caller, other_version),
    )
    return JSONResponse(bodies.comparison_to_json(await run.policies.compare_policies(caller, request)))


async def promote_policy(run: RunOfPath, caller: Authenticated, policy_version: str) -> Response:
    """Mark the version that is meant for use. Its snapshot is kept."""
    request = await _change(run, caller, policy_version)
    return JSONResponse(bodies.policy_to_json(await run.policies.promote_policy(caller, request)))


async def roll_back_policy(run: RunOfPath, caller: Authenticated, policy_version: str) -> Response:
    """Hold every rollout server at this version, from its snapshot, until `policies:release`."""
    request = await _change(run, caller, policy_version)
    return JSONResponse(bodies.policy_to_json(await run.policies.roll_back_policy(caller, request)))


async def retire_policy(run: RunOfPath, caller: Authenticated, policy_version: str) -> Response:
    request = await _change(run, caller, policy_version)
    return JSONResponse(bodies.policy_to_json(await run.policies.retire_policy(caller, request)))


async def release_policy(run: RunOfPath, caller: Authenticated) -> Response:
    """End a roll back."""
    request = policies_pb2.ReleasePolicyRequest(run=run.name)
    return JSONResponse(bodies.policy_to_json(await run.policies.release_policy(caller, request)))


async def pin_policy(run: RunOfPath, caller: Authenticated, pin: str, body: bodies.PinPolicyBody) -> Response:
    """Pin a key, a session or an evaluation of this name to the version. A server of this name stays at the version."""
    request = policies_pb2.PinPolicyRequest(run=run.name, pin=pin, policy_version=body.policy_version)
    return JSONResponse(bodies.policy_to_json(await run.policies.pin_policy(caller, request)))


async def unpin_policy(run: RunOfPath, caller: Authenticated, pin: str) -> Response:
    answer = await run.policies.unpin_policy(caller, policies_pb2.UnpinPolicyRequest(run=run.name, pin=pin))
    return JSONResponse({"was_pinned": answer.was_pinned})


async def _change(run: ServedRun, caller: Caller, text: str) -> policies_pb2.ChangePolicyRequest:
    return policies_pb2.ChangePolicyRequest(run=run.name, policy_version=await _number(run, caller, text))


async def _number(run: ServedRun, caller: Caller, text: str) -> int:
    """The number of a version that is given by number or as the latest one."""
    version = policy_version_of(text)
    if version is None:
        latest = await run.policies.get_policy(caller, policies_pb2.GetPolicyRequest(run=run.name))
        version = latest.policy_version
    return version
