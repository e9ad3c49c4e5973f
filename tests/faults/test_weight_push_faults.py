"""Servers and learners hang, die, return and join while weights are pushed. The processes are real.

The tests share one run and need the order of this file. Each leaves two healthy servers, `a` and `b`, and a learner
that trains. Server `a` is never touched: it must go on, whatever happens to the others.

In `make test`, members without a run do the same: they hang in a push (test_relayed_push.py), are silent and catch up
(test_unreachable_server.py), are evicted and let in again (test_policy_publication.py, test_membership.py), die in a
push and join late (test_weight_transports.py).
"""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import redis.asyncio as redis
import torch
from transformers import AutoModelForCausalLM

from penstock.codec import encode_prompt
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import Evaluation
from penstock.store.fleet import SERVING_STATES
from penstock.trajectory import Group, Trajectory
from penstock.weights.snapshot import read_manifest, read_snapshot
from penstock.weights.transports import host_checksum, weights_digest
from penstock_learner.weights.publisher import WeightPublisher
from penstock_learner.weights.senders import PushTarget
from support.fleet_runs import FleetRun, Move, Part, fleet_config, training_prompts
from support.processes import is_alive
from support.redis_server import RedisProcess

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
TOLERANCE = 1e-3
TORCH = "torch"
"""Shared memory, as in `shm`, and the engine that starts soonest. The others run vLLM."""
VARIANTS: dict[str, dict[str, Any]] = {
    TORCH: {"ready_timeout_s": 3},
    "shm": {},
    "gloo": {"transport": "gloo", "bucket_bytes": 2**18},
    "gloo-delta": {"transport": "gloo", "delta": True},
    "snapshot": {"transport": "snapshot", "catch_up": "snapshot"},
}


@pytest.fixture(scope="module", params=VARIANTS)
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, redis_process: RedisProcess
) -> Iterator[FleetRun]:
    folder = tmp_path_factory.mktemp("fleet")
    config = fleet_config(folder, redis_process.url, f"faults-{request.param}", **VARIANTS[request.param])
    if request.param == TORCH:
        engine = config.rollout.engine.model_copy(update={"name": "torch"})
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})
    with FleetRun(config, redis_process.url) as run:
        run.start_server("a")
        run.start_server("b")
        run.start_learner()
        yield run


def test_both_servers_follow_the_learner_while_they_generate(run: FleetRun) -> None:
    run.until_serving("a", "b", above=0, timeout_s=240)
    start = run.current
    run.until_serving("a", "b", above=start + 10)
    for server_id in ("a", "b"):
        run.until(partial(has_mixed, run, server_id), f"{server_id} to generate through a push")
        versions = run.watch.versions(server_id)
        assert versions == sorted(set(versions)), "a server never goes back"
        assert run.watch.states(server_id)[:3] == ["JOINING", "STALE", "READY"]
    check_groups(run)


def test_a_server_that_hangs_is_evicted_and_returns_with_the_current_version(run: FleetRun) -> None:
    run.until_serving("a", "b", above=run.current, timeout_s=240)
    stopped, stopped_s = run.parts["b"], run.redis_time_s()
    stopped.stop()
    run.until(lambda: "EVICTED" in run.watch.states("b", stopped_s), "b to be evicted")
    frozen, current = run.servers()["b"].policy_version, run.current
    run.until_serving("a", above=current + 2)
    run.until(lambda: run.current > current + 2, "what `a` serves to be published")
    assert run.watch.states("b", stopped_s)[-1] == "EVICTED"
    assert "EVICTED" not in run.watch.states("a", stopped_s)

    returned_s, returned_ms = run.redis_time_s(), time.time() * 1000
    stopped.go_on()
    run.until_serving("b", above=current + 2)
    assert run.watch.states("b", returned_s)[:2] == ["STALE", "READY"]
    [ready_s] = [m.time_s for m in run.watch.moves if m.time_s > returned_s and is_move(m, "b", "READY")][:1]
    run.until(lambda: max(run.watch.versions("b", ready_s), default=0) > current + 2, "b's next report")
    late = [
        r for r in run.watch.reports if r.server_id == "b" and r.time_s >= ready_s and r.policy_version <= current + 2
    ]
    assert len(late) <= 1, "it serves again only with the current version; one report may have been on its way"
    run.until(lambda: run.watch.groups_of("b", returned_ms + 1000), "b to append groups again")
    leftovers = [group for group in run.watch.groups_of("b", returned_ms) if group.min_version <= frozen]
    assert len(leftovers) <= run.config.rollout.max_concurrent_groups, (
        "only the groups that it worked on when it was stopped"
    )
    check_groups(run)


@pytest.mark.parametrize("seed", range(4))
def test_a_server_killed_in_a_push_and_a_new_one_join_as_latecomers(run: FleetRun, seed: int) -> None:
    run.until_serving("a", "b", above=run.current)
    killed, killed_s, current = run.parts["b"], run.redis_time_s(), run.current
    run.until(lambda: "LOADING" in run.watch.states("b", killed_s), "a push to b")
    time.sleep(random.Random(seed).uniform(0, 0.3))
    killed.kill()
    newcomer = f"new-{seed}"
    run.start_server("b")
    run.start_server(newcomer)
    run.until(lambda: not any(is_alive(process) for process in killed.tree()), "its engine to end too")
    run.until_serving("a", "b", newcomer, above=current + 5, timeout_s=150)
    for server_id in ("b", newcomer):
        states = run.watch.states(server_id, killed_s)
        joined = states.index("JOINING")
        assert states[joined : joined + 3] == ["JOINING", "STALE", "READY"]
    assert "EVICTED" not in run.watch.states("a", killed_s)

    part = run.parts[newcomer]
    part.may_end = True
    part.process.terminate()
    run.until(lambda: newcomer not in run.servers(), f"{newcomer} to leave")
    run.until(lambda: part.process.poll() is not None, f"{newcomer} to end")
    assert part.process.returncode == 0, part.output()[-2000:]
    check_groups(run)


def test_stamps_name_the_weights_and_digests_agree(run: FleetRun) -> None:
    """Trajectories of a single version have the log-probs that Hugging Face computes from the snapshot of that version.
    The digest of the weights that the servers loaded equals that of the publication and that of the snapshot."""
    run.until_serving("a", "b", above=run.current)
    policies = run.policies()
    reported = [
        report for report in list(run.watch.reports) if report.weights_digest and report.policy_version in policies
    ]
    assert {report.server_id for report in reported} >= {"a", "b"}
    for report in reported:
        assert report.weights_digest == policies[report.policy_version].weights_digest, report
    groups = [g for g in run.watch.all_groups() if g.min_version == g.max_version > 0 and g.min_version in policies]
    versions = sorted({group.min_version for group in groups})
    chosen = sorted({*versions[:: max(1, len(versions) // 8)], versions[-1]})
    assert len(chosen) >= 5
    other: torch.nn.Module | None = None
    are_apart = []
    for version in chosen:
        policy = policies[version]
        kept = read_manifest(run.config.folder / "snapshots" / f"version-{version:08d}")
        assert weights_digest(kept.bucket_checksums) == policy.weights_digest
        buckets = read_snapshot(run.config.folder / "snapshots" / f"version-{version:08d}", kept.manifest)
        assert [host_checksum(kept.manifest.checksum, bucket) for bucket in buckets] == list(kept.bucket_checksums)
        model = AutoModelForCausalLM.from_pretrained(policy.snapshot_path, dtype=torch.float32).eval()
        found = [group for group in groups if group.min_version == version]
        assert max(log_prob_error(model, group) for group in found) < TOLERANCE, f"version {version}"
        if other is not None:
            are_apart.append(max(log_prob_error(other, group) for group in found) > TOLERANCE)
        other = model
    # Steps in which no group has an advantage hardly change the weights, so two versions need not differ.
    assert are_apart.count(True) > len(are_apart) / 2, "versions can be told apart"


def test_a_learner_that_hangs_is_replaced_and_cannot_push_any_more(run: FleetRun) -> None:
    """The learner is suspended during a push. The servers go on serving, and a server that restarts meanwhile loads the
    kept snapshot by itself. A second learner takes over, and then the first one wakes up."""
    run.until_serving("a", "b", above=run.config.learner.checkpoint.every_steps, timeout_s=240)
    zombie, stopped_s = run.parts["learner"], run.redis_time_s()
    run.until(lambda: "LOADING" in run.watch.states("a", stopped_s), "a push")
    zombie.stop()
    current = run.current
    assert all(server.state in SERVING_STATES for server in run.servers().values() if server.server_id in ("a", "b"))
    check_served(run, run_evaluation(run, "without-a-learner"), current)

    run.parts["b"].kill()
    restarted_s = run.redis_time_s()
    run.start_server("b", "--weights.catch_up", "snapshot")
    run.until(lambda: "READY" in run.watch.states("b", restarted_s), "b to catch up by itself", timeout_s=150)
    assert run.watch.states("b", restarted_s) == ["JOINING", "STALE", "READY"]
    found = run.until(lambda: run.servers()["b"].policy_version == current and run.servers()["b"], "b's report")
    assert found.weights_digest == run.policies()[current].weights_digest
    assert f"loaded version {current} from" in run.parts["b"].output()

    successor = run.start_learner("--weights.transport", "gloo", name="learner-2")
    run.until_serving("a", "b", above=current + 5, timeout_s=150)
    assert run.stat().term == 2
    assert "continuing from" in successor.output()
    woken_s, before = run.redis_time_s(), run.current
    zombie.may_end = True
    zombie.go_on()
    run.until(lambda: zombie.process.poll() is not None, "the first learner to end")
    assert zombie.process.returncode == 1
    last = zombie.output().strip().splitlines()[-1]
    assert re.fullmatch(r"penstock learner: error: term 1 has passed; .* stop this one", last)
    run.until_serving("a", "b", above=before + 5)
    for server_id in ("a", "b"):
        assert set(run.watch.states(server_id, woken_s)) <= set(SERVING_STATES), (
            "the replaced learner changed no server's version"
        )
        versions = run.watch.versions(server_id, woken_s)
        assert versions == sorted(set(versions))
    published = {version for version in run.policies() if version > before}
    run.until(lambda: published <= made_versions(successor), "the second learner's lines about what was published")

    report = push_under_term(run, 1)
    assert all(f"term 1 has passed; the current one is {run.stat().term}" in why for why in report.values())
    assert report.keys() == {"a", "b"}
    run.parts["learner"] = run.parts.pop("learner-2")
    check_groups(run)


@pytest.mark.parametrize("seed", range(2))
def test_a_learner_killed_in_a_push_is_continued_under_a_higher_term(run: FleetRun, seed: int) -> None:
    run.until_serving("a", "b", above=run.current)
    killed, killed_s, term = run.parts["learner"], run.redis_time_s(), run.stat().term
    run.until(lambda: "LOADING" in run.watch.states("a", killed_s), "a push")
    time.sleep(random.Random(seed).uniform(0, 0.3))
    killed.kill()
    current = run.current
    check_served(run, run_evaluation(run, f"killed-{seed}"), current)
    run.until(lambda: not any(is_alive(process) for process in killed.tree()), "its ranks to end too")
    run.start_learner()
    run.until_serving("a", "b", above=current + 5, timeout_s=150)
    assert run.stat().term == term + 1
    assert "JOINING" not in run.watch.states("a", killed_s) + run.watch.states("b", killed_s)
    check_groups(run)


def check_groups(run: FleetRun) -> None:
    """Check every group seen so far: each token has a version, versions never decrease within a sample, and every
    version was loaded by the server. Check that no prompt was lost or counted twice."""
    for server_id in {group.server_id for group in run.watch.all_groups()}:
        log = (run.config.folder / f"{server_id}.log").read_text(errors="replace")
        loaded = {0} | {int(version) for version in re.findall(r"(?:serving|loaded) version (\d+)", log)}
        for trajectory in trajectories(run, server_id):
            ends = [0, *(segment.end for segment in trajectory.segments)]
            assert [segment.start for segment in trajectory.segments] == ends[:-1]
            assert ends[-1] == len(trajectory.token_ids) == len(trajectory.log_probs)
            versions = [segment.policy_version for segment in trajectory.segments]
            assert versions == sorted(set(versions))
            assert set(versions) <= loaded
    assert len(run.watch.conservation_errors) > 10
    assert set(run.watch.conservation_errors) == {0}


def trajectories(run: FleetRun, server_id: str) -> list[Trajectory]:
    return [trajectory for group in run.watch.groups_of(server_id) for trajectory in group.trajectories]


def is_move(move: Move, server_id: str, state: str) -> bool:
    return (move.server_id, move.state) == (server_id, state)


def has_mixed(run: FleetRun, server_id: str) -> bool:
    """Whether the server has appended a sample with tokens of several versions."""
    return any(len(trajectory.segments) > 1 for trajectory in trajectories(run, server_id))


def log_prob_error(model: torch.nn.Module, group: Group) -> float:
    """The largest difference between the recorded log-probs and those of a forward pass over the same tokens."""
    prompt = group.prompt_token_ids.tolist()
    errors = []
    for trajectory in group.trajectories:
        ids = torch.tensor([prompt + trajectory.token_ids.tolist()])
        with torch.no_grad():
            log_probs = (model(ids).logits[0] / group.sampling.temperature).log_softmax(-1)
        own = log_probs[range(len(prompt) - 1, ids.shape[1] - 1), ids[0, len(prompt) :]].numpy()
        errors.append(float(np.abs(own - trajectory.log_probs).max()))
    return max(errors)


def run_evaluation(run: FleetRun, evaluation_id: str) -> Evaluation:
    """Evaluation prompts, which need no admission: servers answer them with or without a learner."""
    prompts = [replace(prompt, evaluation_id=evaluation_id) for prompt in itertools.islice(training_prompts(), 8)]

    def queue(client: redis.Redis) -> RedisReplayQueue:
        return RedisReplayQueue(client, run.config.run, run.config.replay)

    run.ask(lambda client: queue(client).create_evaluation(evaluation_id, [encode_prompt(p) for p in prompts]))

    def finished() -> Evaluation | None:
        evaluation = run.ask(lambda client: queue(client).get_evaluation(evaluation_id))
        return evaluation if evaluation.num_finished == len(prompts) else None

    found = run.until(finished, f"evaluation {evaluation_id}")
    assert found is not None
    return found


def check_served(run: FleetRun, finished: Evaluation, current: int) -> None:
    """The evaluation was answered with the current version, or with a newer one that a server has loaded since. A
    server reports the version it serves a moment after it has loaded it."""
    answered = {finished.policy_version_min, finished.policy_version_max}

    def are_reported() -> bool:
        servers = run.servers()
        return answered <= {current, *(servers[server_id].policy_version for server_id in ("a", "b"))}

    run.until(are_reported, f"reports of the versions {answered} that answered the evaluation")


def made_versions(learner: Part) -> set[int]:
    """The versions that the learner made, according to its log."""
    return {int(version) for version in re.findall(r"step \d+ version (\d+)", learner.output())}


def push_under_term(run: FleetRun, term: int) -> dict[str, str]:
    """The replies of all servers of the fleet to a publisher of this term."""
    publisher = WeightPublisher(run.config, "127.0.0.1")
    staged = publisher.begin(10**6, term, [("weight", (4,))])
    staged.put("weight", torch.zeros(4))
    targets = [
        PushTarget(server.server_id, server.address, server.devices, server.host_id, server.transports)
        for server in run.servers().values()
        if server.state in SERVING_STATES
    ]
    return publisher.push(10**6, targets).failed
