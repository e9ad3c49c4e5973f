"""Training steps over real workers in this process."""

from __future__ import annotations

import asyncio
import math
import shutil
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from transformers import AutoModelForCausalLM

from penstock.config.algorithms import AdvantageConfig, AlgorithmConfig, KLConfig
from penstock.config.learner import LearnerConfig, RoleConfig
from penstock.errors import ConfigError, TrainingDiverged
from penstock.store.fleet import ServerRecord
from penstock.tracing import Tracing
from penstock_learner.batches.sequence_batch import batch_of
from penstock_learner.loop.step_loop import StepRecords
from penstock_learner.metrics import MAX_REWARD_PARTS, LearnerMetrics
from penstock_learner.roles.dispatch import RankUsage
from penstock_learner.steps.program import with_advantages
from penstock_learner.steps.roles import Throughput
from penstock_learner.steps.step_result import SkippedSteps, StepTimes, mean_rewards, reward_part_means
from penstock_learner.term import KLController, Rewind, Term
from support.groups import groups_of, made_by, make_group
from support.learner_ranks import make_step
from support.scripted_engines import make_tokenizer_folder, spelled
from support.tiny_models import make_tiny_qwen2

pytestmark = pytest.mark.usefixtures("one_rank")


async def test_all_forwards_run_at_the_same_time_and_so_do_the_updates(tiny_models: dict[str, Path]) -> None:
    gates = {"forward": asyncio.Barrier(4), "update": asyncio.Barrier(2)}
    step = make_step(
        tiny_models, gates,
        algorithm={"advantage": {"name": "gae"}, "kl": {"placement": "reward"}},
        critic={}, reward_model={"path": str(tiny_models["scalar"])},
    )  # fmt: skip
    metrics = (await step.run(groups_of("a", "b"), 1, Term(kl=KLController(KLConfig(), 0.1)))).by_name()
    assert metrics["critic_loss"] > 0 and metrics["grad_norm"] > 0
    assert metrics["return_min"] < metrics["return_mean"] < metrics["return_max"]


async def test_the_reward_model_adds_or_replaces_for_its_data_sources(tiny_models: dict[str, Path]) -> None:
    groups = groups_of("chat/a", "rules")
    rules = [group.mean_reward for group in groups]

    async def mean_reward(**settings: Any) -> float:
        step = make_step(tiny_models, reward_model={"path": str(tiny_models["scalar"]), **settings})
        result = await step.run(groups, 1, Term())
        overall = result.by_name()["reward_mean"]
        by_source = mean_rewards(groups, result.rewards)
        assert by_source.keys() == {"chat/a", "rules"}
        assert sum(by_source.values()) / 2 == pytest.approx(overall, abs=1e-5)
        if settings.get("data_sources") == ["chat*"]:
            assert by_source["rules"] == pytest.approx(rules[1], abs=1e-5)
        return overall

    score_of_chat = 2 * await mean_reward(combine="replace", data_sources=["chat*"]) - rules[1]
    assert abs(score_of_chat - rules[0]) > 1e-3
    added = await mean_reward(coefficient=0.5, data_sources=["chat*"])
    assert 2 * added == pytest.approx(rules[0] + 0.5 * score_of_chat + rules[1], abs=1e-5)
    assert await mean_reward(data_sources=["none"]) == pytest.approx(sum(rules) / 2)
    everything = await mean_reward(combine="replace")
    score_of_rules = 2 * await mean_reward(combine="replace", data_sources=["rules"]) - rules[0]
    assert 2 * everything == pytest.approx(score_of_chat + score_of_rules, abs=1e-5)


async def test_a_judge_is_asked_after_the_trajectory(tmp_path: Path) -> None:
    """Compares the score with a plain forward pass over prompt, response and question."""
    folder = make_tiny_qwen2(tmp_path / "judge", seed=5)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(make_tokenizer_folder(tmp_path / "tokenizer") / name, folder / name)
    models = {"policy": folder}
    (group,) = groups = groups_of("chat")
    judge = {"question": "good", "yes": "y", "no": "n"}
    step = make_step(models, reward_model={"path": str(folder), "judge": judge, "combine": "replace", "coefficient": 2})
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    expected = []
    for trajectory in group.trajectories:
        ids = torch.tensor([[*group.prompt_token_ids.tolist(), *trajectory.token_ids.tolist(), *spelled("good")]])
        expected.append(2 * plain(ids).logits[0, -1, spelled("yn")].softmax(0)[0].item())
    assert max(expected) - min(expected) > 0.01
    assert (await step.run(groups, 1, Term())).by_name()["reward_mean"] == pytest.approx(sum(expected) / 4, abs=1e-5)
    with pytest.raises(ConfigError, match="must be two different tokens"):
        make_step(models, reward_model={"path": str(folder), "judge": judge | {"no": "no"}})


async def test_scores_of_the_reward_model_that_are_not_finite_name_their_prompts(
    tiny_models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    step = make_step(tiny_models, reward_model={"path": str(tiny_models["scalar"]), "data_sources": ["bad"]})
    model: Any = step.roles["reward_model"]
    with torch.no_grad():
        for parameter in model.rank.model.parameters():
            parameter.fill_(torch.nan)
    metrics = (await step.run(groups_of("good", "bad"), 1, Term())).by_name()
    assert metrics["skipped"] == 1
    assert "the reward model's scores of prompts 2 are not finite" in caplog.text


async def test_a_critic_that_cannot_step_ends_the_run_although_the_policy_can(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """The squares of the rewards overflow, so the value loss is infinite. The whitened advantages stay finite."""
    groups = groups_of("good", "bad")
    hit = tuple(replace(trajectory, reward=1e30) for trajectory in groups[1].trajectories)
    groups[1] = replace(groups[1], trajectories=hit)
    step = make_step(tiny_models, algorithm={"advantage": {"name": "gae"}}, critic={})
    step.skipped = SkippedSteps(2, tmp_path)
    metrics = (await step.run(groups, 1, Term())).by_name()
    assert (metrics["skipped"], metrics["critic_skipped"]) == (0, 1)
    with pytest.raises(TrainingDiverged, match=r"the critic's loss of prompts .*2.* at step 2 \(2 such steps"):
        await step.run(groups, 2, Term())
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002.npz"]


async def test_the_spread_and_the_parts_of_rewards_are_metrics(tiny_models: dict[str, Path]) -> None:
    group = make_group(1, num_samples=3)
    parts = ({"format": 1.0, "an swer/": 3.0}, {"format": 0.5}, {"format": math.nan})
    scored = tuple(
        replace(trajectory, reward=reward, reward_parts=own)
        for trajectory, reward, own in zip(group.trajectories, (-1.0, 0.0, 4.0), parts, strict=True)
    )
    greedy = replace(scored[0], is_baseline=True, reward=99.0)
    group = replace(group, trajectories=(*scored, greedy))
    metrics = (await make_step(tiny_models).run([group], 1, Term())).by_name()
    assert (metrics["reward_min"], metrics["reward_max"]) == (-1, 4)
    assert metrics["reward_std"] == pytest.approx(np.std([-1, 0, 4]))
    assert metrics["advantage_min"] < 0 < metrics["advantage_max"] < 2, (
        "in deviations; the greedy sample does not count"
    )
    lengths = [len(sample.token_ids) for sample in scored]
    assert (metrics["response_length_min"], metrics["response_length_max"]) == (min(lengths), max(lengths))
    assert (metrics["reward_part/format"], metrics["reward_part/an_swer_"]) == (0.75, 3)
    prometheus = LearnerMetrics(CollectorRegistry(), "standalone")
    names = {f"reward_part/{letter}": 1.0 for letter in "abcdefghijklmnopqrst"}
    prometheus.record_step(
        metrics | dict.fromkeys(("wait_s", "compare_s", "gather_s", "step_s", "compute_s"), 0.0) | names, {}
    )
    assert prometheus.registry.get_sample_value("penstock_reward_part_mean", {"part": "format"}) == 0.75
    assert prometheus.registry.get_sample_value("penstock_reward_std") == metrics["reward_std"]
    series = [s for family in prometheus.registry.collect() for s in family.samples if "part" in s.labels]
    assert len(series) == MAX_REWARD_PARTS, "a reward function cannot make more and more series"
    invented = [replace(t, reward_parts={f"part {i} {j}": 1.0 for j in range(9)}) for i, t in enumerate(scored)]
    assert len(reward_part_means([replace(group, trajectories=tuple(invented))])) == MAX_REWARD_PARTS


async def test_memory_and_the_share_of_flops_are_numbers_of_a_step() -> None:
    ranks = [RankUsage(gib * 2**30, "NVIDIA H100", 10**9, (gib + 1) * 2**30, 9 * 2**30) for gib in (3, 5)]

    class Policy:
        async def call_all(self, method: str) -> list[RankUsage]:
            return ranks if method == "usage" else []

    policy: Any = Policy()
    batch, update = SimpleNamespace(prompt_tokens=600, response_tokens=400), SimpleNamespace(shared_tokens=0)
    result: Any = SimpleNamespace(batch=batch, update=update, update_s=2.0)

    async def numbers() -> dict[str, float]:
        metrics = LearnerMetrics(CollectorRegistry(), "standalone")
        config = LearnerConfig(policy=RoleConfig(num_ranks=2, gpus_per_rank=1))
        return await StepRecords(config, policy, metrics, Tracing(), None).usage_numbers(result)

    memory = {"memory_peak_gib": 5, "memory_reserved_gib": 6, "host_memory_gib": 9}
    assert await numbers() == memory | {"num_gpus": 2, "mfu": pytest.approx(6e12 / 2 / (2 * 989e12))}
    ranks = [RankUsage(2**29, "cpu", 10**9)]
    assert await numbers() == {"memory_peak_gib": 0.5, "num_gpus": 2}, "nothing else is known"


async def test_the_greedy_sample_is_scored_and_not_trained(tiny_models: dict[str, Path]) -> None:
    group = make_group(1, num_samples=3)
    greedy = replace(group.trajectories[0], is_baseline=True, reward=10.0)
    marked = replace(group, trajectories=(*group.trajectories[1:], greedy))
    algorithm = {"advantage": {"name": "remax"}, "loss": {"name": "reinforce"}, "correction": {"mode": "bypass"}}
    step = make_step(tiny_models, algorithm=algorithm)
    result = await step.run([marked], 1, Term())
    metrics = result.by_name()
    trained = group.trajectories[1:]
    assert metrics["num_sequences"] == 2
    assert metrics["reward_mean"] == pytest.approx(sum(t.reward for t in trained) / 2)
    assert mean_rewards([marked], result.rewards)[group.data_source] == pytest.approx(metrics["reward_mean"])
    assert metrics["response_tokens"] == sum(len(t.token_ids) for t in trained)
    # A baseline that another config left in the groups has no effect on an algorithm without baselines.
    plain, left_over = [
        await make_step(tiny_models, algorithm={"correction": {"mode": "bypass"}}).run([one], 1, Term())
        for one in (replace(group, trajectories=trained), marked)
    ]
    assert left_over.update.loss == plain.update.loss


def test_the_kl_penalty_does_not_change_the_greedy_reward() -> None:
    """The greedy sample equals the only other sample, so the advantage of a token is `-coefficient * KL`."""
    group = make_group(1, num_samples=1)
    (sample,) = group.trajectories
    twins = replace(group, trajectories=(sample, replace(sample, is_baseline=True)))
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name="remax"), kl=KLConfig(placement="reward", penalty="k1"))
    batch = batch_of([twins])
    batch = replace(batch, reference_log_probs=batch.behaviour_log_probs - 0.5)
    advantages = with_advantages(batch, algorithm, 0.1).without_baselines().advantages
    assert advantages is not None
    still_to_pay = np.arange(len(sample.token_ids), 0, -1)
    np.testing.assert_allclose(advantages, -0.1 * 0.5 * still_to_pay, atol=1e-6)


async def test_a_skipped_step_leaves_the_counters_as_they_were(tiny_models: dict[str, Path]) -> None:
    """A NaN log-prob makes every ratio and every KL NaN."""
    step = make_step(tiny_models, algorithm={"kl": {"placement": "loss"}})
    (metric,) = step.metrics.importance_ratio.collect()
    before = metric.samples
    policy: Any = step.roles["policy"]
    with torch.no_grad():
        kept = policy.rank.model.lm.model.norm.weight.clone()
        policy.rank.model.lm.model.norm.weight.fill_(torch.nan)
    metrics = (await step.run(groups_of("a", "b"), 1, Term(kl=KLController(KLConfig(), 0.1)))).by_name()
    assert metrics["skipped"] == 1 and math.isnan(metrics["kl_reference"])
    (metric,) = step.metrics.importance_ratio.collect()
    assert metric.samples == before
    with torch.no_grad():
        policy.rank.model.lm.model.norm.weight.copy_(kept)
    metrics = (await step.run(groups_of("a", "b"), 2, Term(kl=KLController(KLConfig(), 0.1)))).by_name()
    assert metrics["skipped"] == 0
    (metric,) = step.metrics.importance_ratio.collect()
    assert math.isfinite(metric.samples[-1].value) and metric.samples != before


async def test_the_numbers_of_a_step_include_the_correction(tiny_models: dict[str, Path]) -> None:
    """The made-up log-probs are far from the model's, so some weights are truncated and some tokens rejected."""
    correction = {"cap": 0.3, "rejection": "token", "rejection_low": 0.1, "rejection_high": 0.4}
    metrics = (
        await make_step(tiny_models, algorithm={"correction": correction}).run(groups_of("a", "b"), 1, Term())
    ).by_name()
    assert metrics["importance_weight_max"] == pytest.approx(0.3)
    assert metrics["importance_ratio_max"] > 0.4
    assert 0 < metrics["is_rejected_ratio"] < 1 and 0 < metrics["is_truncated_ratio"] < 1
    kept = (await make_step(tiny_models).run(groups_of("a", "b"), 1, Term())).by_name()
    assert kept["is_rejected_ratio"] == 0


async def test_the_result_of_a_step_does_not_change_and_a_users_number_hides_none_of_it(
    tiny_models: dict[str, Path],
) -> None:
    result: Any = await make_step(tiny_models).run(groups_of("a", "b"), 1, Term())
    with pytest.raises(TypeError, match="does not support item assignment"):
        result.others["more"] = 1.0
    for part, name in ((result, "step"), (result.batch, "reward_mean"), (result.update, "loss")):
        with pytest.raises(FrozenInstanceError):
            setattr(part, name, 9.0)
    named = replace(result, others={"loss": 9.0, "own": 8.0}).by_name()
    assert (named["loss"], named["own"]) == (result.update.loss, 8.0)
    incomparable = replace(result, update=replace(result.update, logprob_mismatch=None))
    assert "logprob_mismatch" in named and "logprob_mismatch" not in incomparable.by_name()


async def test_staleness_is_in_steps_through_a_rewind(tiny_models: dict[str, Path]) -> None:
    step = make_step(tiny_models)
    term = Term(policy_version=10, lineage=(Rewind(from_version=3, to_version=9),))
    metrics = (await step.run([made_by(1, 3), made_by(2, 2)], 1, term)).by_name()
    assert metrics["staleness_max"] == 2 and 1 < metrics["staleness_mean"] < 2


async def test_samples_that_are_omitted_or_reordered_have_no_log_probs_to_show(tiny_models: dict[str, Path]) -> None:
    shuffled = await make_step(tiny_models, shuffle_minibatches=True).run(groups_of("a", "b"), 1, Term())
    group = make_group(1, num_samples=3)
    greedy = replace(group.trajectories[0], is_baseline=True)
    groups = [replace(group, trajectories=(*group.trajectories[1:], greedy))]
    with_greedy = await make_step(tiny_models).run(groups, 1, Term())
    assert shuffled.recomputed is None and with_greedy.recomputed is None


async def test_an_entropy_bonus_raises_the_entropy(tiny_models: dict[str, Path]) -> None:
    """The rewards are equal, so there is nothing else to learn."""
    groups = [replace(g, trajectories=tuple(replace(t, reward=1.0) for t in g.trajectories)) for g in groups_of("a")]
    changes = []
    for coefficient in (0.5, 0.0):
        step = make_step(tiny_models, lr=1e-2, algorithm={"loss": {"entropy_coefficient": coefficient}})
        before, *_, after = [(await step.run(groups, number, Term())).by_name()["entropy"] for number in (1, 2, 3)]
        changes.append(after - before)
    assert changes[0] > 1e-3 and changes[1] == 0


async def test_a_kl_penalty_can_be_in_the_reward_and_in_the_loss(tiny_models: dict[str, Path]) -> None:
    """`both` trains as `reward` does if its weight in the loss is 0, and otherwise not. Each place has an estimator."""

    async def trained(**kl: Any) -> dict[str, float]:
        step = make_step(tiny_models, algorithm={"advantage": {"name": "reinforce_plus_plus"}, "kl": kl}, lr=1e-2)
        policy: Any = step.roles["policy"]
        with torch.no_grad():
            policy.rank.model.lm.model.norm.weight.mul_(1.3)
        return (await step.run(groups_of("a", "b"), 1, Term(kl=KLController(KLConfig(), 0.1)))).by_name()

    reward = await trained(placement="reward", penalty="k1")
    same = await trained(placement="both", penalty="k1", loss_penalty="k3", loss_coefficient=0.0)
    both = await trained(placement="both", penalty="k1", loss_penalty="k3", loss_coefficient=2.0)
    assert same["grad_norm"] == reward["grad_norm"] and same["kl_loss"] == 0
    assert both["grad_norm"] != pytest.approx(reward["grad_norm"], rel=1e-3)
    assert both["kl_reference"] == reward["kl_reference"] and both["kl_loss"] == 2 * both["kl_reference"]
    alone = await trained(placement="loss", penalty="k3")
    shared = await trained(placement="both", penalty="k3")
    assert alone["kl_loss"] == shared["kl_loss"] > 0
    assert alone["grad_norm"] != pytest.approx(shared["grad_norm"], rel=1e-4)


async def test_the_policy_begins_in_the_step_that_verl_begins_in(tiny_models: dict[str, Path]) -> None:
    """`critic_warmup_steps: 3`: the first update is that of step 3, and its learning rate is the schedule's first."""
    step = make_step(
        tiny_models, lr=1e-3, critic={"lr": 1e-3}, critic_warmup_steps=3, warmup_steps=2,
        algorithm={"advantage": {"name": "gae"}},
    )  # fmt: skip
    policy: Any = step.roles["policy"]
    weights, rates, critic_rates = [], [], []
    for number in (1, 2, 3, 4):
        metrics = (await step.run(groups_of("a", "b"), number, Term())).by_name()
        weights.append(policy.rank.model.lm.model.norm.weight.detach().clone())
        rates.append(metrics["lr"])
        critic_rates.append(metrics["critic_lr"])
    assert rates == [0, 0, 0, 5e-4] and critic_rates == [0, 5e-4, 1e-3, 1e-3]
    assert torch.equal(weights[0], weights[2]) and not torch.equal(weights[2], weights[3])
    begun = make_step(tiny_models, critic={}, critic_warmup_steps=1, algorithm={"advantage": {"name": "gae"}})
    assert (await begun.run(groups_of("a"), 1, Term())).by_name()["lr"] == begun.config.lr
    optimizer: Any = begun.roles["policy"]
    assert optimizer.rank.optimizer.state, "the policy was updated in step 1"


@pytest.mark.parametrize(
    ("wait_s", "compute_s", "overhead", "idle"),
    [(0.0, 10.0, 0.0, 0.0), (5.0, 4.0, 0.2, 0.6), (0.0, 0.0, 1.0, 1.0), (9.0, 2.0, 0.0, 0.8)],
)
def test_overhead_excludes_waiting_and_idle_time_does_not(
    wait_s: float, compute_s: float, overhead: float, idle: float
) -> None:
    times = StepTimes(wait_s, compare_s=0.0, between_s=1.0, gather_s=0.0, step_s=9.0, compute_s=compute_s)
    assert times.overhead_ratio == pytest.approx(overhead) and times.idle_ratio == pytest.approx(idle)


def test_the_throughput_of_a_phase_is_that_since_the_step_before() -> None:
    throughput = Throughput()
    throughput.add("update", 100, 2.0)
    throughput.add("update", 100, 3.0)
    assert throughput.rates() == {"update_tokens_per_second": 40}
    throughput.add("reference", 0, 0.0)
    assert throughput.rates() == {}


def test_servers_generate_tokens_in_the_seconds_in_which_they_have_requests() -> None:
    throughput, group = Throughput(), make_group(1)

    def counted(*generating_s: float) -> dict[str, float]:
        servers = [
            ServerRecord(name, "a:1", "vllm", generating_s=seconds)
            for name, seconds in zip((group.server_id, "idle"), generating_s, strict=True)
        ]
        throughput.add_generation(servers, [group, group])
        return throughput.rates()

    num_tokens = group.num_response_tokens
    assert counted(5.0, 1.0) == {}, "when it began is not known"
    assert counted(6.0, 1.0) == {}, "its report may be older than the batch"
    assert counted(13.0, 1.0) == {"generation_tokens_per_second": 4 * num_tokens / 8}
    assert counted(0.5, 1.0) == {}, "it was started again"
    assert counted(6.5, 1.0) == {"generation_tokens_per_second": 2 * num_tokens / 6}
