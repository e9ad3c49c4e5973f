"""Runs, servers and dead letters through REST and through gRPC: the same answers, the same refusals."""

from __future__ import annotations

import json

import grpc
import pytest

from penstock.api import records
from penstock.api.records import Run
from penstock.cli.commands.observe import parse_series
from penstock.diagnosis.terminal import alarms, server_alarms
from penstock.replay.queue import RedisReplayQueue
from penstock.store.fleet import Fleet, Quarantine, Quarantines, RunControl, ServerRecord
from penstock.store.heartbeats import LEARNER, Heartbeats, Phases
from penstock.store.notices import MAX_OF_KIND, Event, NoticeBoard, Notices
from penstock.v1 import (
    policies_pb2,
    policies_pb2_grpc,
    runs_pb2,
    runs_pb2_grpc,
)
from support.gateways import PROMPT, RUN, Gateway, ageless, as_json, both, post_prompts, publish, rest, stubs, submit


async def scraped_state(gateway: Gateway) -> str:
    series = parse_series((await gateway.rest.get("/metrics")).text)
    (state,) = (state for state, value in series["penstock_run_state"].items() if value)
    return state


async def test_a_server_paused_by_failures_is_seen_and_resumed(gateway: Gateway, queue: RedisReplayQueue) -> None:
    _, _, _, runs = stubs(gateway)
    await submit(gateway, *[PROMPT] * 10)
    await Fleet(queue.client, "test").join(ServerRecord("s", "127.0.0.1:1", "torch"))
    limit = queue.config.breaker.non_finite_failures
    for _ in range(limit // 4):
        failed = [await queue.give_back("s", lease, "non_finite") for lease in await queue.lease("s", 4)]
    assert failed == [False, False, False, True]

    run = await both(gateway, "GET", RUN, runs.GetRun(runs_pb2.GetRunRequest()), as_json(records.Run))
    [server] = run["servers"]
    assert (server["breaker_reason"], server["breaker_failures"], run["state"]) == ("non_finite", limit, "WAITING")
    series = parse_series((await gateway.rest.get("/metrics")).text)
    assert series["penstock_rollout_servers_paused"] == {"": 1.0}
    [line] = server_alarms(Run.model_validate(run).servers)
    assert line.plain.startswith(f"s leases nothing: its last {limit} attempts failed, the newest with non_finite")

    change = runs_pb2.ChangeRunRequest()
    run = await both(gateway, "POST", f"{RUN}:resume", runs.ResumeRun(change), as_json(records.Run))
    assert run["servers"][0]["breaker_reason"] == "" and len(await queue.lease("s", 2)) == 2


async def test_a_server_in_quarantine_is_seen_with_its_numbers(gateway: Gateway, queue: RedisReplayQueue) -> None:
    _, _, _, runs = stubs(gateway)
    await Fleet(queue.client, "test").join(ServerRecord("s", "127.0.0.1:1", "torch"))
    await Quarantines(queue.client, "test").put(
        Quarantine("s", 0.5, 0.125, policy_version=7, since_ms=1, num_reloads=2), await queue.take_term(0)
    )
    run = await both(gateway, "GET", RUN, runs.GetRun(runs_pb2.GetRunRequest()), as_json(records.Run))
    [server] = run["servers"]
    shown = [server[name] for name in ("is_quarantined", "logprob_mismatch_nats", "logprob_limit_nats", "num_reloads")]
    assert shown == [True, 0.5, 0.125, 2]
    series = parse_series((await gateway.rest.get("/metrics")).text)
    assert series["penstock_rollout_servers_quarantined"] == {"": 1.0}
    [line] = server_alarms(Run.model_validate(run).servers)
    assert line.plain.startswith("s is in quarantine: its log-probs differ by 0.5 nats a token, more than 0.125")


async def test_a_run_that_pauses_itself_says_why_and_what_failed(gateway: Gateway, queue: RedisReplayQueue) -> None:
    _, _, _, runs = stubs(gateway)
    board = NoticeBoard(Notices(queue.client, "test"))
    for text in ("the reward of sample 0 failed", "the reward of sample 1 failed", "the reward of sample 2 failed"):
        board.post(Event("reward_failed", "KeyError reward.py:3", text, "Traceback\nKeyError: 'x'"))
    board.post(Event("default_reward", "mine", "unknown data source 'mine'"))
    await board.write()
    for number in range(40):
        board.post(Event("prompt_failed", f"{number}", "noise"))
    await board.write()
    await RunControl(queue.client, "test").pause("the reward failed on 8 of the newest 8 samples")

    run = await both(gateway, "GET", RUN, runs.GetRun(runs_pb2.GetRunRequest()), as_json(records.Run))
    assert (run["state"], run["detail"]) == ("PAUSED", "the reward failed on 8 of the newest 8 samples")
    assert len(run["notices"]) == 2 + MAX_OF_KIND
    [failed] = [notice for notice in run["notices"] if notice["kind"] == "reward_failed"]
    assert (failed["text"], failed["count"]) == ("the reward of sample 0 failed", 3)
    assert failed["detail"] == "Traceback\nKeyError: 'x'" and failed["first_at_ms"] <= failed["last_at_ms"]
    shown = "\n".join(line.plain for line in alarms(Run.model_validate(run)))
    assert "paused: the reward failed on 8" in shown and "sample 0 failed (3 times)" in shown
    assert "unknown data source 'mine'" in shown

    change = runs_pb2.ChangeRunRequest()
    run = await both(gateway, "POST", f"{RUN}:resume", runs.ResumeRun(change), as_json(records.Run))
    assert (run["notices"], run["state"]) == ([], "WAITING")
    await RunControl(queue.client, "test").pause()
    assert (await rest(gateway, "GET", RUN))["detail"] == "", "an operator's pause has no reason"


async def test_the_phases_of_a_start_are_shown_in_order(gateway: Gateway, queue: RedisReplayQueue) -> None:
    phases = Phases(queue.client, "test")
    for _ in range(2):
        await phases.enter(LEARNER, "starting Ray", is_first=True)
        await phases.enter(LEARNER, "loading the model")
        await phases.enter(LEARNER, "loading the model")
    run = await rest(gateway, "GET", RUN)
    assert "learner: loading the model" in [line.plain for line in alarms(Run.model_validate(run))]
    [part] = run["parts"]
    assert part["component"] == LEARNER
    assert [phase["name"] for phase in part["phases"]] == ["starting Ray", "loading the model"]


async def test_the_metrics_of_the_newest_step_stay_after_a_restart(gateway: Gateway, queue: RedisReplayQueue) -> None:
    """A restarted learner publishes its weights as a version that no step has made."""
    await queue.take_term(0)
    for version, metrics in ((1, {"reward_mean": 0.5}), (2, {})):
        await queue.publish(
            version, 1, policies_pb2.Policy(policy_version=version, metrics=metrics).SerializeToString()
        )
    run = await rest(gateway, "GET", RUN)
    assert run["policy_version"] == 2 and run["metrics"] == {"reward_mean": 0.5}
    assert run["learning"].startswith("reward 0.5 over 1 step")
    finding, speed = run["learning_finding"], run["speed_finding"]
    assert (finding["code"], finding["level"], finding["text"]) == ("few_steps", "OK", run["learning"])
    assert (finding["check"], speed["check"]) == ("learning", "speed")
    assert speed["code"] == "not_running" and Run.model_validate(run).speed_finding is not None


async def test_the_run_is_paused_and_its_servers_drained(gateway: Gateway, queue: RedisReplayQueue) -> None:
    _, _, _, runs = stubs(gateway)
    await submit(gateway, *[PROMPT] * 3)
    await Fleet(queue.client, "test").join(ServerRecord("s", "127.0.0.1:1", "torch"))
    change, to_json = runs_pb2.ChangeRunRequest(), as_json(records.Run)
    assert await scraped_state(gateway) == "waiting"
    await Heartbeats(queue.client, "test").beat(LEARNER)
    assert await scraped_state(gateway) == "waiting", "the server's engine is not up"
    await Fleet(queue.client, "test").set_state("s", "READY")

    assert (await both(gateway, "POST", f"{RUN}:pause", runs.PauseRun(change), to_json))["state"] == "PAUSED"
    assert await queue.lease("s", 1) == []
    assert await scraped_state(gateway) == "paused"
    assert (await both(gateway, "POST", f"{RUN}:resume", runs.ResumeRun(change), to_json))["state"] == "RUNNING"
    assert await scraped_state(gateway) == "running"
    assert len(await queue.lease("s", 1)) == 1

    path, request = f"{RUN}/servers/s", runs_pb2.ChangeServerRequest(server_id="s")
    drained = await both(gateway, "POST", f"{path}:drain", runs.DrainServer(request), as_json(records.Server))
    assert drained["is_drained"] and await queue.lease("s", 1) == [] and len(await queue.lease("t", 1)) == 1
    undrained = await both(gateway, "POST", f"{path}:undrain", runs.UndrainServer(request), as_json(records.Server))
    assert not undrained["is_drained"] and len(await queue.lease("s", 1)) == 1
    assert (await gateway.rest.post(f"{RUN}/servers/none:drain")).status_code == 404

    await queue.take_term(0)
    assert (await both(gateway, "POST", f"{RUN}:stop", runs.StopRun(change), to_json))["state"] == "STOPPED"
    await queue.take_term(0)
    [run] = (
        await both(gateway, "GET", "/v1/runs", runs.ListRuns(runs_pb2.ListRunsRequest()), as_json(records.RunList))
    )["runs"]
    assert run["state"] == "PAUSED"


async def test_a_dash_stands_for_the_gateways_own_run(gateway: Gateway) -> None:
    _, _, _, runs = stubs(gateway)
    for name in ("-", "", "test"):
        assert (await runs.GetRun(runs_pb2.GetRunRequest(run=name))).run == "test"
    assert (await rest(gateway, "GET", "/v1/runs/-"))["run"] == "test"


async def test_scores_of_evaluations_are_listed_by_benchmark_and_number(
    gateway: Gateway, queue: RedisReplayQueue
) -> None:
    _, _, _, runs = stubs(gateway)
    for name in ("validation-math-10", "validation-math-9", "other"):
        await queue.create_evaluation(name, [b"q"])
        [lease] = await queue.lease("s", 1)
        await queue.record_evaluation(name, lease, [0.5, 1.0], 0, 0)
    listed = await both(
        gateway, "GET", f"{RUN}/metrics", runs.ListMetrics(runs_pb2.ListMetricsRequest()), as_json(records.MetricsList)
    )
    assert listed["scores"] == [
        {"benchmark": "validation-math", "number": 9, "score": 0.75},
        {"benchmark": "validation-math", "number": 10, "score": 0.75},
    ]


async def test_a_step_that_was_made_again_is_listed_once(gateway: Gateway, queue: RedisReplayQueue) -> None:
    _, _, _, runs = stubs(gateway)
    await queue.take_term(0)
    for version, step in enumerate((5, 6, 5), 1):
        policy = policies_pb2.Policy(policy_version=version, step=step, metrics={"reward_mean": version / 10})
        await queue.publish(version, step, policy.SerializeToString())
    await queue.publish(4, 5, policies_pb2.Policy(policy_version=4, step=5).SerializeToString())
    listed = await both(
        gateway, "GET", f"{RUN}/metrics", runs.ListMetrics(runs_pb2.ListMetricsRequest()), as_json(records.MetricsList)
    )
    assert [(step["step"], step["policy_version"]) for step in listed["steps"]] == [(5, 3)], "6 is yet to come again"


async def test_dead_letters_are_paged_and_requeued(gateway: Gateway, queue: RedisReplayQueue) -> None:
    _, _, _, runs = stubs(gateway)
    await submit(gateway, *[PROMPT] * 3)
    for lease in await queue.lease("s", 3):
        await queue.give_back("s", lease, f"reason_{lease.prompt_id} of it", is_final=True)
    pages, token = [], ""
    while not pages or token:
        request = runs_pb2.ListDeadLettersRequest(page_size=2, page_token=token)
        page = await both(
            gateway, "GET", f"{RUN}/dead-letters?page_size=2&page_token={token}", runs.ListDeadLetters(request),
            as_json(records.DeadLetterPage),
        )  # fmt: skip
        pages.append([letter["prompt_id"] for letter in page["dead_letters"]])
        token = page["next_page_token"]
    assert pages == [[3, 2], [1]]
    assert page["reasons"] == {"reason_1": 1, "reason_2": 1, "reason_3": 1}
    [letter] = (await rest(gateway, "GET", f"{RUN}/dead-letters?kind=reason_2"))["dead_letters"]
    answer = await rest(gateway, "POST", f"{RUN}/dead-letters/{letter['letter_id']}:requeue")
    assert answer == {"prompt_id": 4}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await runs.RequeueDeadLetter(runs_pb2.RequeueDeadLetterRequest(letter_id=letter["letter_id"]))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_the_run_is_listed_and_others_are_not_served(gateway: Gateway) -> None:
    _, _, _, runs = stubs(gateway)
    listed = await both(gateway, "GET", "/v1/runs", runs.ListRuns(runs_pb2.ListRunsRequest()), as_json(records.RunList))
    assert [(run["run"], run["state"]) for run in listed["runs"]] == [("test", "WAITING")]
    change = runs_pb2.ChangeRunRequest(run="test")
    for verb, call, state in (
        ("stop", runs.StopRun, "PAUSED"), ("pause", runs.PauseRun, "PAUSED"), ("resume", runs.ResumeRun, "WAITING"),
    ):  # fmt: skip
        answer = await both(gateway, "POST", f"{RUN}:{verb}", call(change), as_json(records.Run))
        assert answer["state"] == state
    entries = [json.loads(line) for line in (gateway.config.folder / "audit.jsonl").read_text().splitlines()]
    assert [(entry["operation"], entry["request"]) for entry in entries[::2]] == [
        (f"{verb}_run", {"run": "test"}) for verb in ("stop", "pause", "resume")
    ]
    refused = await gateway.rest.get("/v1/runs/third")
    assert refused.json()["reason"] == "NOT_FOUND" and "serves 'test'" in refused.json()["detail"]
    assert (await gateway.rest.post("/v1/runs", json={"config": {}})).status_code == 405


async def test_the_run_its_policies_and_its_servers(gateway: Gateway, queue: RedisReplayQueue) -> None:
    await post_prompts(gateway, PROMPT)
    await publish(queue, 1, 2)
    fleet = Fleet(queue.client, "test")
    for server_id, state, version in (("a", "READY", 2), ("b", "LOADING", 1), ("c", "STALE", 2)):
        record = ServerRecord(server_id, "127.0.0.1:1", "torch", policy_version=version, weights_digest=f"d{version}")
        await fleet.join(record)
        await fleet.set_state(server_id, state)  # type: ignore[arg-type]

    run = await rest(gateway, "GET", RUN)
    assert (run["run"], run["step"], run["policy_version"], run["metrics"]) == ("test", 2, 2, {"reward_mean": 0.2})
    assert (run["queue"]["pending_prompts"], run["queue"]["conservation_error"]) == (1, 0)
    assert [server["state"] for server in run["servers"]] == ["READY", "LOADING", "STALE"]
    latest = await rest(gateway, "GET", f"{RUN}/policies/latest")
    assert (latest["policy_version"], latest["server_ids"]) == (2, ["a"])
    assert (await rest(gateway, "GET", f"{RUN}/policies/1"))["server_ids"] == ["b"]
    servers = await rest(gateway, "GET", f"{RUN}/servers")
    assert {(server["policy_version"], server["weights_digest"]) for server in servers["servers"]} >= {
        (2, "d2"),
        (1, "d1"),
    }

    run_service = runs_pb2_grpc.RunServiceStub(gateway.channel)
    policy_service = policies_pb2_grpc.PolicyServiceStub(gateway.channel)
    answer = as_json(records.Run)(await run_service.GetRun(runs_pb2.GetRunRequest()))
    assert ageless(answer) == ageless(run)
    answer = as_json(records.ServerList)(await run_service.ListServers(runs_pb2.ListServersRequest()))
    assert ageless(answer) == ageless(servers)
    answer = await policy_service.GetPolicy(policies_pb2.GetPolicyRequest())
    assert as_json(records.Policy)(answer) == latest
    answer = await policy_service.ListPolicies(policies_pb2.ListPoliciesRequest())
    assert as_json(records.PolicyPage)(answer) == await rest(gateway, "GET", f"{RUN}/policies")
