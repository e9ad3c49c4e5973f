"""Every preset of examples/presets loads, has the settings of its algorithm, and trains a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.loading import load_config, validate
from penstock.config.run import RunConfig
from penstock_learner.batches.partition import partition, unpermute
from penstock_learner.batches.sequence_batch import SequenceBatch, batch_of
from penstock_learner.model.published_layout import full_weight
from penstock_learner.roles.critic import CriticWorker
from penstock_learner.roles.policy import PolicyWorker
from penstock_learner.steps.program import denominators_of, with_advantages
from support.groups import make_group
from support.learner_ranks import make_rank, with_model

pytestmark = pytest.mark.usefixtures("one_rank")
PRESETS = Path(__file__).parents[4] / "examples" / "presets"
CHOICES: dict[str, dict[str, Any]] = {
    "grpo": {
        "advantage.name": "grpo", "advantage.normalize_by_std": True, "loss.name": "ppo", "loss.epsilon_high": 0.2,
        "loss.dual_clip": 3, "loss.aggregation_mode": "seq-mean-token-mean", "kl.placement": "loss", "kl.penalty": "k3",
        "kl.coefficient": 1e-3,
    },
    "dr_grpo": {
        "advantage.name": "grpo", "advantage.normalize_by_std": False,
        "loss.aggregation_mode": "seq-mean-token-sum-norm", "kl.placement": "none",
    },
    "ppo": {
        "advantage.name": "gae", "advantage.gamma": 1, "advantage.lam": 1, "loss.name": "ppo", "loss.epsilon_low": 0.2,
        "loss.epsilon_high": 0.2, "loss.dual_clip": 3, "value_loss.clip": 0.5, "kl.placement": "reward",
    },
    "reinforce_plus_plus": {
        "advantage.name": "reinforce_plus_plus", "loss.name": "ppo", "kl.placement": "reward", "kl.penalty": "k1",
    },
    "rloo": {"advantage.name": "rloo", "loss.name": "reinforce", "loss.ratio_cap": 2, "correction.mode": "bypass"},
    "remax": {"advantage.name": "remax", "advantage.has_baseline": True, "loss.name": "reinforce"},
    "dapo": {
        "advantage.name": "grpo", "loss.epsilon_low": 0.2, "loss.epsilon_high": 0.28,
        "loss.aggregation_mode": "token-mean", "kl.placement": "none", "overlong.factor": 1,
    },
    "gspo": {
        "advantage.name": "grpo", "loss.name": "gspo", "loss.epsilon_low": 3e-4, "loss.epsilon_high": 4e-4,
        "loss.aggregation_mode": "seq-mean-token-mean",
    },
    "cispo": {"advantage.name": "grpo", "loss.name": "cispo", "loss.epsilon_high": 0.2, "loss.epsilon_low": 1.0},
}  # fmt: skip


CUSTOM = """
from dataclasses import replace
from penstock_learner.algorithms.advantages import grpo
from penstock_learner.algorithms.losses import reinforce

def doubled(inputs, config):
    outputs = grpo(inputs, config)
    return replace(outputs, advantages=2 * outputs.advantages)

def halved(inputs, config):
    outputs = reinforce(inputs, config)
    return replace(outputs, per_token=outputs.per_token / 2)
"""


@pytest.fixture
def model(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["policy"]


def test_each_algorithm_of_the_list_has_a_preset() -> None:
    assert sorted(path.stem for path in PRESETS.glob("*.yaml")) == sorted(CHOICES)


@pytest.mark.parametrize("name", CHOICES)
def test_a_preset_makes_the_choices_of_its_algorithm(name: str) -> None:
    config = load_config(PRESETS / f"{name}.yaml")
    for path, expected in CHOICES[name].items():
        value: Any = config.learner.algorithm
        for part in path.split("."):
            value = getattr(value, part)
        assert value == expected, path
    assert config.replay.dynamic_sampling == (name == "dapo")
    assert (config.learner.critic is not None) == (name == "ppo")
    assert (config.learner.minibatches_per_step > 1) == (name in ("ppo", "dapo", "gspo")), "or no clip would ever act"
    longest = config.dataset.max_tokens
    assert config.learner.algorithm.loss.constant_length in (None, longest)
    assert config.learner.algorithm.overlong is None or config.learner.algorithm.overlong.max_num_tokens == longest


@pytest.mark.parametrize("name", CHOICES)
def test_a_preset_trains_a_step(name: str, model: Path) -> None:
    preset = load_config(PRESETS / f"{name}.yaml")
    config = validate(with_model(preset.model_dump(mode="json"), model), name)
    policy = make_rank(PolicyWorker, config)
    critic = make_rank(CriticWorker, config) if config.learner.critic else None
    batch = a_batch(config)
    (shard,) = shards = partition(batch, 1, 64)
    batch = replace(batch, old_log_probs=unpermute([policy.log_probs(shard)], shards, batch))
    if critic is not None:
        batch = replace(batch, values=unpermute([critic.values(shard)], shards, batch))
    batch = with_advantages(batch, config.learner.algorithm, 0.1).without_baselines()
    denominators = denominators_of(batch, config.learner.algorithm.loss)
    (shard,) = partition(batch, 1, 64)
    step = config.learner.critic_warmup_steps + config.learner.warmup_steps + 1
    before = weights(policy)
    report = policy.update(shard, denominators, step, 0, 0.1)
    assert np.isfinite(report.loss) and report.step.grad_norm > 0 and not report.step.skipped
    assert not torch.equal(before, weights(policy))
    assert batch.num_sequences == (6 if name == "remax" else 8)
    if critic is not None:
        value_report = critic.update(shard, denominators, step)
        assert value_report.loss > 0 and value_report.step.grad_norm > 0


def test_a_custom_loss_and_advantage_train_by_import_path(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The custom functions double the advantage and halve the loss, so the gradient is that of the built-in ones."""
    (tmp_path / "algorithms_of_a_user.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)
    reports = []
    for advantage, loss in (("grpo", "reinforce"), ("algorithms_of_a_user:doubled", "algorithms_of_a_user:halved")):
        algorithm = {"advantage": {"name": advantage}, "loss": {"name": loss}, "correction": {"mode": "bypass"}}
        config = validate(with_model({"learner": {"algorithm": algorithm}}, model), "test")
        batch = with_advantages(a_batch(config), config.learner.algorithm, 0.0)
        (shard,) = partition(batch, 1, 64)
        policy = make_rank(PolicyWorker, config)
        reports.append(policy.update(shard, denominators_of(batch, config.learner.algorithm.loss), 1, 0, 0.0))
    assert reports[1].loss == pytest.approx(reports[0].loss, rel=1e-5)
    assert reports[1].step.grad_norm == pytest.approx(reports[0].step.grad_norm, rel=1e-5)


def a_batch(config: RunConfig) -> SequenceBatch:
    groups = [make_group(prompt_id) for prompt_id in (1, 2)]
    if config.learner.algorithm.advantage.has_baseline:
        groups = [
            replace(group, trajectories=(*group.trajectories[1:], replace(group.trajectories[0], is_baseline=True)))
            for group in groups
        ]
    batch = batch_of(groups)
    return replace(batch, reference_log_probs=batch.behaviour_log_probs - 0.1)


def weights(policy: PolicyWorker) -> torch.Tensor:
    return torch.cat([full_weight(parameter).detach().flatten() for parameter in policy.model.parameters()])
