"""Why a run does not learn, and why it is slow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.diagnosis.facts import RunFacts, Validating
from penstock.diagnosis.progress import Steps, learning_finding, speed_finding
from penstock.store.fleet import OpenBreaker, Orders, ServerRecord
from penstock.store.reports import LAST_VALIDATION, Phase
from penstock.v1 import policies_pb2
from support import run_facts

STAT = replace(run_facts.STAT, policy_version=20, pending_prompts=100)
SERVER = ServerRecord("s", "a:1", "vllm", "READY", policy_version=19, running_groups=8, running_requests=64)
BREAKER = OpenBreaker("s", "non_finite", num_failures=8, probe_in_s=1.0)
STEP = {
    "reward_mean": 0.25, "reward_failed_ratio": 0.0, "truncated_ratio": 0.1, "zero_advantage_group_ratio": 0.4,
    "skipped": 0.0, "lr": 1e-6, "grad_norm": 0.3, "entropy": 0.8, "kl_reference": 0.01, "staleness_mean": 1.0,
    "is_rejected_ratio": 0.0, "effective_sample_ratio": 0.9, "step_s": 10.0, "wait_s": 1.0, "update_s": 4.5,
    "forward_s": 1.5, "gather_s": 0.5, "compare_s": 2.0,
}  # fmt: skip


def facts(steps: Steps = (STEP,) * 12, dataset: dict[str, Any] | None = None, **changes: Any) -> RunFacts:
    sections = {"replay": {"max_staleness": 2, "groups_per_step": 10}, "dataset": dataset or {}}
    return run_facts.run_facts(steps, sections, **{"stat": STAT, "servers": [SERVER], **changes})


def with_rewards(*rewards: float, **numbers: float) -> Steps:
    return [STEP | numbers | {"reward_mean": reward} for reward in rewards]


@pytest.mark.parametrize(
    ("numbers", "code", "level", "said"),
    [
        ({}, "flat", "WARN", "60% of the groups have spread, learning rate 1e-06, gradient norm 0.3, KL 0.01"),
        ({"reward_failed_ratio": 1.0, "zero_advantage_group_ratio": 1.0}, "rewards_fail", "FAIL", "fails on 100% of"),
        ({"reward_failed_ratio": 0.2}, "rewards_fail", "WARN", "fails on 20% of"),
        ({"truncated_ratio": 0.95, "zero_advantage_group_ratio": 1.0}, "truncated", "FAIL", "95% of the responses"),
        ({"zero_advantage_group_ratio": 0.96}, "no_spread", "FAIL", "96% of the groups have no spread"),
        ({"skipped": 1.0}, "skipped", "FAIL", "100% of the steps were skipped"),
        ({"lr": 0.0}, "learning_rate", "FAIL", "the learning rate is 0"),
        ({"is_rejected_ratio": 0.6, "staleness_mean": 5.0}, "stale", "WARN", "staleness 5, 60% of the tokens rejected"),
        ({"effective_sample_ratio": 0.1}, "stale", "WARN", "an effective share of 10%"),
        ({"entropy": 0.001}, "collapsed", "WARN", "entropy 0.001"),
        ({"kl_reference": 2.0}, "kl", "WARN", "KL 2 nats"),
    ],
)  # fmt: skip
def test_the_cause_of_a_flat_reward(numbers: dict[str, float], code: str, level: str, said: str) -> None:
    finding = learning_finding(facts(with_rewards(*[0.25] * 12, **numbers)))
    assert (finding.code, finding.level) == (code, level)
    assert finding.text.startswith("reward 0.25 over 12 steps, flat") and said in finding.text
    assert finding.advice and finding.line.endswith(finding.advice)


@pytest.mark.parametrize(
    ("rewards", "code"),
    [
        ((), "no_step"),
        ((0.1, 0.2, 0.3), "few_steps"),
        ((0.1, 0.12, 0.1, 0.2, 0.22, 0.25, 0.3, 0.33, 0.32), "rising"),
        ((0.3, 0.33, 0.32, 0.2, 0.22, 0.25, 0.1, 0.12, 0.1), "falling"),
        ((0.1, 0.5, 0.2, 0.1, 0.4, 0.3, 0.2, 0.5, 0.1, 0.4, 0.3, 0.1), "flat"),
        ((0.42, 0.43, 0.40, 0.48, 0.45, 0.51), "few_steps"),
    ],
)
def test_the_trend_of_the_reward(rewards: tuple[float, ...], code: str) -> None:
    assert learning_finding(facts(with_rewards(*rewards))).code == code


def test_a_learned_task_is_not_a_failure() -> None:
    """All groups are equal, because all samples are right; all wrong is a failure."""
    range_of = {"zero_advantage_group_ratio": 0.96, "reward_min": 0.0, "reward_max": 1.0}
    solved = learning_finding(facts(with_rewards(*[0.99] * 12, **range_of)))
    assert (solved.code, solved.level) == ("solved", "OK")
    assert learning_finding(facts(with_rewards(*[0.02] * 12, **range_of))).code == "no_spread"
    all_wrong = with_rewards(*[0.0] * 12, **range_of | {"reward_max": 0.0})
    assert learning_finding(facts(all_wrong)).code == "no_spread"
    near_the_top = with_rewards(*[0.9] * 12, reward_min=0.0, reward_max=1.0)
    finding = learning_finding(facts(near_the_top))
    assert (finding.code, finding.level) == ("solved", "OK") and "flat at 90% of the highest reward" in finding.text


def test_a_reward_near_its_maximum_is_not_a_failure() -> None:
    """The steps before count for the trend, but not for how much is left to learn."""
    rewards = (0.5, 0.97, 0.2, 0.9, *[0.94] * 8)
    finding = learning_finding(facts(with_rewards(*rewards, reward_min=0.0, reward_max=1.0)))
    assert (finding.code, finding.level) == ("solved", "OK") and "flat at 94% of the highest reward" in finding.text


def test_cut_responses_are_named_before_prompts_that_are_too_hard() -> None:
    equal = {"zero_advantage_group_ratio": 0.95, "reward_min": 0.0, "reward_max": 1.0}
    finding = learning_finding(facts(with_rewards(*[0.02] * 12, truncated_ratio=0.87, **equal)))
    assert (finding.code, finding.level) == ("truncated", "FAIL") and "87% of the responses are cut" in finding.text
    some = learning_finding(facts(with_rewards(*[0.25] * 12, truncated_ratio=0.6)))
    assert (some.code, some.level) == ("truncated", "WARN")
    solved = learning_finding(facts(with_rewards(*[0.99] * 12, truncated_ratio=0.95, **equal)))
    assert solved.code == "solved", "long answers may be right"


def test_a_wait_for_the_last_validation_is_not_a_staleness_bound() -> None:
    servers, stat = [replace(SERVER, running_groups=0)], replace(STAT, queued=12, delivered=5)
    steps, phases = [STEP | {"wait_s": 8.0}] * 12, {"learner": [Phase(LAST_VALIDATION, 0)]}
    finding = speed_finding(facts(steps, servers=servers, stat=stat, phases=phases))
    assert (finding.code, finding.level) == ("validation", "OK") and "validation of the last policy" in finding.text


@pytest.mark.parametrize(("server", "stat"), [
    ({}, {}), ({"running_groups": 0}, {"queued": 12}), ({"waiting_requests": 65}, {}),
])  # fmt: skip
def test_a_validation_before_the_first_step_is_shown_with_its_progress(
    server: dict[str, Any], stat: dict[str, int]
) -> None:
    busy = {"servers": [replace(SERVER, **server)], "stat": replace(STAT, **stat), "validation": Validating(0, 40, 256)}
    finding = speed_finding(facts((), **busy))
    assert (finding.code, finding.level, finding.advice) == ("validation", "OK", "")
    assert finding.text == "validating version 0 before the first step: 40/256 prompts"
    loading = {"learner": [Phase("loading the model", 0)]}
    starting = speed_finding(facts((), **busy, phases=loading))
    assert starting.code == "not_running" and starting.text.endswith(f"to start; {finding.text}")


def test_a_wait_during_a_validation_is_not_a_staleness_bound() -> None:
    idle, full = [replace(SERVER, running_groups=0)], replace(STAT, queued=12, delivered=5)
    steps, running = [STEP | {"wait_s": 8.0}] * 12, Validating(25, 1, 2)
    finding = speed_finding(facts(steps, servers=idle, stat=full, validation=running))
    assert finding.text == "the learner waits 80% of 10 s a step: validating the policy of step 25: 1/2 prompts"
    assert (finding.code, finding.level) == ("validation", "OK")


def test_failing_rewards_are_named_from_the_first_step_and_even_if_the_reward_rises() -> None:
    assert learning_finding(facts(with_rewards(0.0, reward_failed_ratio=1.0))).code == "rewards_fail"
    rising = with_rewards(*(0.1 * number for number in range(9)), reward_failed_ratio=0.95)
    assert learning_finding(facts(rising)).code == "rewards_fail"


def test_weights_that_do_not_arrive_are_named() -> None:
    behind = replace(SERVER, policy_version=15)
    assert learning_finding(facts(servers=[SERVER, behind])).code == "weights"
    assert learning_finding(facts(servers=[SERVER, replace(behind, state="EVICTED")])).code == "flat"


@pytest.mark.parametrize(
    ("times", "server", "stat", "code", "said"),
    [
        (
            {}, {}, {}, "learner",
            "10 s a step, of which update 45%, comparing servers' log-probs 20%, forward 15%, gathering weights 5%, "
            "waiting 10%, the rest 5%",
        ),
        ({"gather_s": 5.0, "update_s": 2.0}, {}, {}, "weights", "gathering weights 50%"),
        ({"wait_s": 8.0}, {}, {}, "groups", "waits 80% of 10 s a step: generation takes long: 8 groups on 1 server"),
        ({"wait_s": 8.0}, {"scoring_groups": 6}, {}, "rewards", "6 of 8 groups on 1 server are being scored"),
        ({"wait_s": 8.0}, {"waiting_requests": 9, "kv_cache_usage": 0.99}, {}, "kv_full", "KV cache is full (99%)"),
        ({"wait_s": 8.0}, {"waiting_requests": 65}, {}, "engine", "65 requests wait and 64 run"),
        (
            {"wait_s": 8.0}, {"running_groups": 0},
            {"pending_prompts": 0, "admitted": 45, "trained": 20, "queued": 25, "delivered": 23, "step": 4,
             "committed_step": 2},
            "prompts", "no prompts are pending, and 5 of the 10 groups of a step are ready",
        ),
        ({"wait_s": 8.0}, {"running_groups": 0}, {"queued": 12, "delivered": 5}, "admission", "7 groups are"),
    ],
)  # fmt: skip
def test_what_a_run_waits_for(
    times: dict[str, float], server: dict[str, Any], stat: dict[str, int], code: str, said: str
) -> None:
    steps, servers = [STEP | times] * 12, [replace(SERVER, **server)]
    finding = speed_finding(facts(steps, servers=servers, stat=replace(STAT, **stat)))
    assert finding.code == code and said in finding.text


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"orders": Orders(is_paused=True)}, "not_running"), ({"servers": []}, "not_running"),
     ({"breakers": {"s": BREAKER}}, "failures"),
     ({"servers": [replace(SERVER, state="EVICTED")]}, "servers"), ({"steps": ()}, "groups")],
)  # fmt: skip
def test_a_run_that_cannot_make_steps(changes: dict[str, Any], code: str) -> None:
    assert speed_finding(facts(**changes)).code == code


@pytest.mark.parametrize(("server", "stat"), [({}, {}), ({"running_groups": 0}, {"queued": 12})])
def test_the_time_before_the_first_step_is_not_called_slow(server: dict[str, Any], stat: dict[str, int]) -> None:
    servers, counts = [replace(SERVER, **server)], replace(STAT, **stat)
    finding = speed_finding(facts((), servers=servers, stat=counts))
    assert finding.text.startswith(f"no step yet: {counts.in_flight} groups are being generated") and not finding.advice


@pytest.mark.parametrize(
    ("dataset", "level", "text", "advice"),
    [({}, "OK", "no prompt to train on has been submitted", "`penstock submit FILE`"),
     ({"file": "train.jsonl"}, "WARN", "the feed has not submitted a prompt of the dataset", "the log of the feed")],
)  # fmt: skip
def test_a_run_that_no_one_submitted_a_prompt_to(dataset: dict[str, Any], level: str, text: str, advice: str) -> None:
    idle, empty = replace(SERVER, running_groups=0), replace(STAT, pending_prompts=0)
    finding = speed_finding(facts((), servers=[idle], stat=empty, dataset=dataset))
    assert (finding.code, finding.level) == ("prompts", level)
    assert finding.text == f"no step yet: {text}" and advice in finding.advice


def test_versions_without_a_step_are_skipped() -> None:
    """A restarted learner publishes its weights again, and a rewind publishes old ones."""
    metrics: list[dict[str, float]] = [{}, {"reward_mean": 2.0}, {"logprob_mismatch": 1.0}, {"reward_mean": 1.0}]
    assert [step["reward_mean"] for step in facts(metrics).steps] == [2.0, 1.0]


def test_steps_that_were_made_again_count_once() -> None:
    """After a restart from the checkpoint of step 2, steps 3 and 4 are made again, and step 5 is yet to come."""
    made = [(1, 0.1), (2, 0.2), (3, 9.0), (4, 9.0), (5, 9.0), (2, None), (3, 0.3), (4, 0.4)]
    policies = [
        policies_pb2.Policy(step=step, metrics={} if reward is None else {"reward_mean": reward})
        for step, reward in made
    ]
    found = facts(policies=policies[::-1])
    assert [step["reward_mean"] for step in found.steps] == [0.1, 0.2, 0.3, 0.4]
