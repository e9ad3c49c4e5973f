"""Policies and evaluations through REST and through gRPC: the same answers, the same refusals."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from penstock.api import records
from penstock.client import PenstockClient
from penstock.errors import Conflict, DeadlineExceeded
from penstock.replay.queue import RedisReplayQueue
from penstock.store.fleet import Fleet, PolicyRegistry, ServerRecord
from penstock.trajectory import Prompt
from penstock.v1 import (
    policies_pb2,
    prompts_pb2,
    runs_pb2,
    runs_pb2_grpc,
)
from penstock_services.gateway.policies import CurrentPolicy
from support.gateways import (
    PROMPT,
    RUN,
    Gateway,
    as_json,
    assert_problem,
    both,
    publish,
    read_events,
    rest,
    stubs,
    submit,
)


async def test_policies_are_compared_promoted_held_pinned_and_retired(
    gateway: Gateway, queue: RedisReplayQueue
) -> None:
    _, _, policies, runs = stubs(gateway)
    await publish(queue, 1, 2, 3)
    fleet = Fleet(queue.client, "test")
    await fleet.join(ServerRecord("a", "127.0.0.1:1", "torch", policy_version=3))
    await fleet.set_state("a", "READY")
    change, to_json = policies_pb2.ChangePolicyRequest, as_json(records.Policy)

    compared = await both(
        gateway, "GET", f"{RUN}/policies:compare?policy_version=1&other_version=3",
        policies.ComparePolicies(policies_pb2.ComparePoliciesRequest(policy_version=1, other_version=3)),
        as_json(records.PolicyComparison),
    )  # fmt: skip
    assert compared["metric_changes"] == {"reward_mean": pytest.approx(0.2)}
    assert (compared["steps_between"], compared["same_weights"]) == (2, True)
    assert compared["other"]["server_ids"] == ["a"]
    for name in ("latest", "current"):
        assert await rest(gateway, "GET", f"{RUN}/policies:compare?policy_version=1&other_version={name}") == compared
        assert (await rest(gateway, "GET", f"{RUN}/policies/{name}"))["policy_version"] == 3
    wrong = await gateway.rest.get(f"{RUN}/policies:compare?policy_version=1&other_version=newest")
    assert wrong.status_code == 400
    assert wrong.json()["detail"] == "other_version: must be a version's number, latest or current, not 'newest'"

    path = f"{RUN}/policies/2"
    refused = await gateway.rest.post(f"{path}:promote")
    assert "version 2 has no snapshot, and its weights no longer exist" in assert_problem(refused, 409, "CONFLICT")
    response = await gateway.rest.post(f"{path}:rewind")
    assert (response.status_code, response.json()["reason"]) == (409, "CONFLICT")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await policies.RewindPolicy(change(policy_version=2))
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    await PolicyRegistry(queue.client, "test").record_snapshots({2: "/snapshots/2"})
    promoted = await both(gateway, "POST", f"{path}:promote", policies.PromotePolicy(change(policy_version=2)), to_json)
    assert (promoted["state"], promoted["snapshot_path"]) == ("PROMOTED", "/snapshots/2")
    refused = await gateway.rest.post(f"{RUN}/policies/1:rewind")
    assert "choose a version that has one (2), or" in assert_problem(refused, 409, "CONFLICT")

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
        lines = response.aiter_lines()
        call = policies.WatchPolicies(policies_pb2.WatchPoliciesRequest())
        [published], first = await read_events(lines, 1), await anext(aiter(call))
        await rest(gateway, "POST", f"{RUN}/policies/3:promote")
        [promoted] = await read_events(lines, 1)
        call.cancel()
    assert to_json(first)["state"] == published["state"] == "PUBLISHED"
    assert (promoted["policy_version"], promoted["state"]) == (3, "PROMOTED")
    metrics = await both(
        gateway, "GET", f"{RUN}/metrics?page_size=2&name=reward_mean",
        runs.ListMetrics(runs_pb2.ListMetricsRequest(page_size=2, names=["reward_mean"])), as_json(records.MetricsList),
    )  # fmt: skip
    assert metrics["scores"] == []
    assert [(s["step"], s["metrics"]) for s in metrics["steps"]] == [
        (2, {"reward_mean": 0.2}),
        (3, {"reward_mean": 0.3}),
    ]


async def test_watchers_of_the_policy_share_one_reader() -> None:
    num_reads, changed, stopping = 0, asyncio.Event(), asyncio.Event()
    policy = policies_pb2.Policy(policy_version=1)

    async def read() -> policies_pb2.Policy:
        nonlocal num_reads
        if num_reads:
            await changed.wait()
        num_reads += 1
        return policy

    current = CurrentPolicy(read, 100.0, stopping)
    watchers = [current.changes() for _ in range(8)]
    async with asyncio.timeout(100):
        first = await asyncio.gather(*(anext(watcher) for watcher in watchers))
        assert [seen.policy_version for seen in first] == [1] * 8 and num_reads == 1
        policy.policy_version = 2
        changed.set()
        second = await asyncio.gather(*(anext(watcher) for watcher in watchers))
        assert [seen.policy_version for seen in second] == [2] * 8
        stopping.set()
        assert [seen for watcher in watchers async for seen in watcher] == []
    await current.close()


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


async def test_policies_are_paged_newest_first(gateway: Gateway, queue: RedisReplayQueue) -> None:
    await publish(queue, 1, 2, 3, 4, 5)
    pages, token = [], ""
    while True:
        page = await rest(gateway, "GET", f"{RUN}/policies?page_size=2&page_token={token}")
        pages.append([policy["policy_version"] for policy in page["policies"]])
        token = page["next_page_token"]
        if not token:
            break
    assert pages == [[5, 4], [3, 2], [1]]
    for query, field in (("page_token=nonsense", "page_token"), ("page_size=-1", "page_size")):
        assert_problem(await gateway.rest.get(f"{RUN}/policies?{query}"), 400, "INVALID_INPUT", field)


async def test_an_evaluation_from_creation_to_score(gateway: Gateway, queue: RedisReplayQueue) -> None:
    prompts = [Prompt(messages=(("user", f"{i}?"),), num_samples=2) for i in range(2)]
    async with PenstockClient(gateway.url, api_key=gateway.key) as client:
        created = await client.create_evaluation("heldout", prompts)
        assert (created.num_prompts, created.num_finished) == (2, 0)
        assert await client.create_evaluation("heldout", prompts) == created
        with pytest.raises(Conflict, match="has other prompts"):
            await client.create_evaluation("heldout", prompts[:1])
        with pytest.raises(DeadlineExceeded, match="0 of 2 prompts"):
            await client.wait_for_evaluation("heldout", timeout_s=0)
        for lease in await queue.lease("s", 2):
            assert prompts_pb2.Prompt.FromString(lease.payload).evaluation_id == "heldout"
            await queue.record_evaluation("heldout", lease, [1.0, 0.0], 3, 4)
        finished = await client.wait_for_evaluation("heldout", timeout_s=100)
    assert (finished.score, finished.policy_version_min, finished.policy_version_max) == (0.5, 3, 4)
    assert (finished.num_samples, finished.pass_at) == (4, {1: 0.5, 2: 1.0})
    answer = await runs_pb2_grpc.RunServiceStub(gateway.channel).GetEvaluation(
        runs_pb2.GetEvaluationRequest(evaluation_id="heldout")
    )
    assert as_json(records.Evaluation)(answer) == await rest(gateway, "GET", f"{RUN}/evaluations/heldout")
