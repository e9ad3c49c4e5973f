"""Policies and evaluations through REST and through gRPC: the same answers, the same refusals."""

from __future__ import annotations

import grpc
import pytest

from gateway_calls import both, read_events, rest, stubs, submit
from gateways import PROMPT, RUN, Gateway, publish
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.store.fleet import Fleet, ServerRecord
from penstock.store.policies import PolicyRegistry
from penstock.v1 import policies_pb2, prompts_pb2, runs_pb2
from penstock_services.gateway.policies import bodies as policy_bodies
from penstock_services.gateway.runs import bodies as run_bodies


async def test_policies_are_compared_promoted_held_pinned_and_retired(
    gateway: Gateway, queue: RedisReplayQueue
) -> None:
    _, _, policies, runs = stubs(gateway)
    await publish(queue, 1, 2, 3)
    fleet = Fleet(queue.client, "test")
    await fleet.join(ServerRecord("a", "127.0.0.1:1", "torch", policy_version=3))
    await fleet.set_state("a", "READY")
    change, to_json = policies_pb2.ChangePolicyRequest, policy_bodies.policy_to_json

    compared = await both(
        gateway, "GET", f"{RUN}/policies:compare?policy_version=1&other_version=3",
        policies.ComparePolicies(policies_pb2.ComparePoliciesRequest(policy_version=1, other_version=3)),
        policy_bodies.comparison_to_json,
    )  # fmt: skip
    assert compared["metric_changes"] == {"reward_mean": pytest.approx(0.2)}
    assert (compared["steps_between"], compared["same_weights"]) == (2, True)
    assert compared["other"]["server_ids"] == ["a"]

    path = f"{RUN}/policies/2"
    promoted = await both(gateway, "POST", f"{path}:promote", policies.PromotePolicy(change(policy_version=2)), to_json)
    assert promoted["state"] == "PROMOTED"
    response = await gateway.rest.post(f"{path}:rollback")
    assert (response.status_code, response.json()["reason"]) == (409, "CONFLICT")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await policies.RollBackPolicy(change(policy_version=2))
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION

    pin = await both(
        gateway, "PUT", f"{RUN}/pins/nightly",
        policies.PinPolicy(policies_pb2.PinPolicyRequest(pin="nightly", policy_version=1)), to_json,
        json={"policy_version": 1},
    )  # fmt: skip
    assert pin["pins"] == ["nightly"]
    assert (await gateway.rest.post(f"{RUN}/policies/1:retire")).status_code == 409
    assert await rest(gateway, "DELETE", f"{RUN}/pins/nightly") == {"was_pinned": True}
    assert not (await policies.UnpinPolicy(policies_pb2.UnpinPolicyRequest(pin="nightly"))).was_pinned
    retired = await both(
        gateway, "POST", f"{RUN}/policies/1:retire", policies.RetirePolicy(change(policy_version=1)), to_json
    )
    assert retired["state"] == "RETIRED"
    assert (await gateway.rest.post(f"{RUN}/policies/1:promote")).status_code == 409
    await both(
        gateway, "POST", f"{RUN}/policies:release", policies.ReleasePolicy(policies_pb2.ReleasePolicyRequest()), to_json
    )

    async with gateway.rest.stream("GET", f"{RUN}/policies:watch") as response:
        call = policies.WatchPolicies(policies_pb2.WatchPoliciesRequest())
        first = await anext(aiter(call))
        await rest(gateway, "POST", f"{RUN}/policies/3:promote")
        seen = await read_events(response, 2)
        call.cancel()
    assert to_json(first)["state"] == seen[0]["state"] == "PUBLISHED"
    assert (seen[1]["policy_version"], seen[1]["state"]) == (3, "PROMOTED")
    metrics = await both(
        gateway, "GET", f"{RUN}/metrics?page_size=2&name=reward_mean",
        runs.ListMetrics(runs_pb2.ListMetricsRequest(page_size=2, names=["reward_mean"])), run_bodies.metrics_to_json,
    )  # fmt: skip
    assert [(s["step"], s["metrics"]) for s in metrics["steps"]] == [
        (2, {"reward_mean": 0.2}),
        (3, {"reward_mean": 0.3}),
    ]


async def test_a_pinned_evaluation_waits_for_a_server_of_its_version(gateway: Gateway, queue: RedisReplayQueue) -> None:
    await publish(queue, 1, 2)
    fleet = Fleet(queue.client, "test")
    for server_id, version in (("old", 1), ("new", 2)):
        await fleet.join(ServerRecord(server_id, "127.0.0.1:1", "torch", policy_version=version))
    for name in ("pinned", "free"):
        body = {"evaluation_id": name, "prompts": [PROMPT] * 2}
        await rest(gateway, "POST", f"{RUN}/evaluations", json=body)
    await rest(gateway, "PUT", f"{RUN}/pins/pinned", json={"policy_version": 1})
    evaluations: dict[str, list[str]] = {}
    for server_id in ("new", "unknown", "old"):
        leases = await queue.lease(server_id, 3)
        evaluations[server_id] = [prompts_pb2.Prompt.FromString(lease.payload).evaluation_id for lease in leases]
    assert evaluations == {"new": ["free", "free"], "unknown": [], "old": ["pinned", "pinned"]}


async def test_a_pinned_server_answers_its_version_s_evaluations_and_nothing_else(
    gateway: Gateway, queue: RedisReplayQueue
) -> None:
    await publish(queue, 1, 2)
    fleet = Fleet(queue.client, "test")
    for server_id, version in (("kept", 1), ("other", 2)):
        await fleet.join(ServerRecord(server_id, "127.0.0.1:1", "torch", policy_version=version))
    response = await gateway.rest.put(f"{RUN}/pins/kept", json={"policy_version": 1})
    assert response.status_code == 409 and "no snapshot of version 1" in response.text
    registry = PolicyRegistry(queue.client, "test")
    await registry.pin("kept", 1)
    for name in ("nightly", "free"):
        await rest(gateway, "POST", f"{RUN}/evaluations", json={"evaluation_id": name, "prompts": [PROMPT]})
    await registry.pin("nightly", 1)
    await submit(gateway, PROMPT)

    async def leased(server_id: str) -> list[str]:
        leases = await queue.lease(server_id, 3)
        return [prompts_pb2.Prompt.FromString(lease.payload).evaluation_id for lease in leases]

    assert (await leased("kept"), await leased("other")) == (["nightly"], ["free", ""])
    await submit(gateway, PROMPT)
    assert await leased("kept") == [], "it trains nothing"
    await registry.unpin("kept")
    assert await leased("kept") == [""]
