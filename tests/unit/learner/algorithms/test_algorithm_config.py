"""Algorithm configuration and the registry of names."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import BaseModel, ValidationError

from penstock.config.algorithms import (
    ADVANTAGE_NAMES,
    LOSS_NAMES,
    AdvantageConfig,
    AlgorithmConfig,
    CorrectionConfig,
    KLConfig,
    LossConfig,
    OverlongConfig,
    RejectionName,
    ValueLossConfig,
    WeightName,
)
from penstock.config.learner import LearnerConfig
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock_learner.algorithms.advantages import ADVANTAGES, AdvantageInputs, compute_advantages
from penstock_learner.algorithms.aggregation import find_function
from penstock_learner.algorithms.losses import LOSSES, LossInputs, correct, policy_loss
from penstock_learner.start_check import try_functions

MODELS = [AdvantageConfig, LossConfig, CorrectionConfig, KLConfig, ValueLossConfig, OverlongConfig, AlgorithmConfig]


def test_config_is_importable_without_torch() -> None:
    code = "import sys, penstock.config.algorithms; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False).returncode
        == 0
    )


@pytest.mark.parametrize("model", MODELS)
def test_every_field_is_documented_and_unknown_ones_are_refused(model: type[BaseModel]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        model.model_validate({"max_num_tokens": 5000, "no_such_key": 1})


def test_configs_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        AdvantageConfig().name = "gae"


def test_names_of_config_and_registry_are_the_same() -> None:
    assert tuple(ADVANTAGES) == ADVANTAGE_NAMES
    assert tuple(LOSSES) == LOSS_NAMES
    one = torch.ones(1)
    for weight, rejection in product(get_args(WeightName), get_args(RejectionName)):
        config = CorrectionConfig(weight=weight, rejection=rejection)
        correction = correct(one, one, one, torch.zeros(1, dtype=torch.int64), config)
        assert correction.weights.tolist() == [1] and correction.kept.tolist() == [True]


def test_settings_that_an_estimator_or_a_loss_needs_or_does_not_use_are_reported() -> None:
    with pytest.raises(ValidationError, match="loss dro needs dro_beta"):
        LossConfig(name="dro")
    with pytest.raises(ValidationError, match="gdpo needs reward_keys"):
        AdvantageConfig(name="gdpo")
    with pytest.raises(ValidationError, match="grpo does not use reward_keys"):
        AdvantageConfig(reward_keys=("right",))
    with pytest.raises(ValidationError, match="one number for each of reward_keys"):
        AdvantageConfig(name="gdpo", reward_keys=("right", "short"), reward_weights=(1.0,))
    parts = AdvantageConfig(name="gdpo", reward_keys=("right",))
    with pytest.raises(ValidationError, match=r"kl.placement would not change it"):
        AlgorithmConfig(advantage=parts, kl=KLConfig(placement="reward"))


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValidationError, match="unknown advantage 'gropo': did you mean 'grpo'"):
        AdvantageConfig(name="gropo")
    with pytest.raises(ValidationError, match="unknown loss 'cispoo': did you mean 'cispo'"):
        LossConfig(name="cispoo")
    with pytest.raises(
        ValueError,
        match="known names: ppo, .*, geo_mean, sapo, clip_cov, kl_cov, dppo_tv, dppo_kl, dro; give your own as",
    ):
        find_function("loss", "zzz", LOSSES)


def test_defaults_are_those_of_the_papers() -> None:
    ppo, gspo = LossConfig(), LossConfig(name="gspo")
    assert (ppo.epsilon_low, ppo.epsilon_high, ppo.dual_clip, ppo.aggregation_mode) == (0.2, 0.2, 3.0, "token-mean")
    assert (gspo.epsilon_low, gspo.epsilon_high, gspo.aggregation_mode) == (3e-4, 4e-4, "seq-mean-token-mean")
    assert LossConfig(name="reinforce").ratio_cap == 2
    assert (CorrectionConfig().cap, CorrectionConfig().weight_name) == (2, "token_truncation")
    assert (KLConfig().coefficient, KLConfig().target, KLConfig().horizon) == (1e-3, 0.1, 10000)
    assert ValueLossConfig().clip == 0.5
    assert OverlongConfig(max_num_tokens=8192).buffer_num_tokens == 4096
    assert (AdvantageConfig().gamma, AdvantageConfig().lam) == (1, 1)


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        (CorrectionConfig, {"mode": "bypass", "weight": "band"}, "decoupled only"),
        (CorrectionConfig, {"band_low": 6}, "band_low must be below"),
        (CorrectionConfig, {"rejection_high": 0.1}, "rejection_low must be below"),
        (LossConfig, {"aggregation": "seq-mean-token-sum-norm"}, "needs constant_length"),
        (LossConfig, {"dual_clip": 1.0}, "greater than 1"),
        (ValueLossConfig, {"aggregation": "seq-mean-token-sum-norm"}, "needs constant_length"),
        (OverlongConfig, {"max_num_tokens": 100}, "must not exceed max_num_tokens"),
        (AlgorithmConfig, {"loss": {"name": "reinforce"}}, "set correction.mode to bypass"),
        (AdvantageConfig, {"name": "remax", "greedy_baseline": False}, "needs the greedy sample"),
        (AdvantageConfig, {"name": "rloo", "greedy_baseline": True}, "does not use a greedy sample"),
        (LearnerConfig, {"algorithm": {"advantage": {"name": "gae"}}}, "needs a critic: add `learner.critic: {}`"),
        (LearnerConfig, {"critic": {}}, "advantage grpo does not use a critic"),
        (LearnerConfig, {"critic_warmup_steps": 3}, "critic_warmup_steps needs a critic"),
        (LearnerConfig, {"reward_model": {"combine": "replace"}}, "path\n  Field required"),
        (
            RunConfig,
            {
                "model": {"path": "m"},
                "rollout": {"reward": {"by_data_source": {"chat*": {"kind": "reward_model"}}}},
            },
            "needs the learner's reward model: add",
        ),
        (
            RunConfig,
            {
                "model": {"path": "m"},
                "replay": {"dynamic_sampling": True},
                "learner": {"reward_model": {"path": "r", "combine": "replace"}},
            },
            "replaces: turn one of them off",
        ),
    ],
)
def test_contradictions_are_refused(model: type[BaseModel], values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        model.model_validate(values)


def test_a_custom_advantage_may_use_a_critic_and_a_greedy_sample() -> None:
    advantage = {"name": "my_project.advantages:mine", "greedy_baseline": True}
    learner = LearnerConfig.model_validate({"critic": {}, "algorithm": {"advantage": advantage}})
    assert learner.algorithm.advantage.has_baseline
    assert AdvantageConfig(name="remax").has_baseline and not AdvantageConfig().has_baseline


def test_a_custom_function_is_reached_by_its_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "custom_advantages_for_test.py").write_text(
        "def flat(inputs, config):\n    return 'flat'\n\ndef alone(inputs): ...\n\nTABLE = {}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("custom_advantages_for_test", tmp_path / "custom_advantages_for_test.py"):
        name = AdvantageConfig(name=f"{module}:flat").name
        function: Any = find_function("advantage", name, ADVANTAGES)
        assert function(None, None) == "flat"
        for wrong, message in (
            ("round", "has no 'round'"),
            ("TABLE", "not a function"),
            ("alone", "alone must take the inputs and the config: too many positional arguments"),
        ):
            with pytest.raises(ConfigError, match=rf"learner.algorithm.advantage.name: .*{message}"):
                find_function("advantage", f"{module}:{wrong}", ADVANTAGES)
    with pytest.raises(ConfigError, match="there is no module no_such_module_for_test"):
        find_function("advantage", "no_such_module_for_test:flat", ADVANTAGES)
    with pytest.raises(ConfigError, match="there is no file nowhere.py"):
        find_function("advantage", "nowhere.py:flat", ADVANTAGES)


ADVANTAGE = "advantage"
LOSS = "loss"


@pytest.mark.parametrize(("kind", "body", "message"), [
    (ADVANTAGE, "inputs.token_rewards * 2", ""),
    (ADVANTAGE, "inputs.values + 1", "fails on a small batch: TypeError: unsupported operand"),
    (ADVANTAGE, "inputs.group_ids", "must return a tensor with one advantage per token"),
    (LOSS, "-inputs.log_probs * inputs.advantages", ""),
    (LOSS, "-(inputs.log_probs * inputs.advantages).mean()", "must return a tensor with one loss per token"),
    (LOSS, "inputs.advantages", "fails on a small batch: RuntimeError: element 0 of tensors does not require grad"),
])  # fmt: skip
def test_a_function_of_a_user_is_tried_before_the_start(tmp_path: Path, kind: str, body: str, message: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def f(inputs, config):\n    return {body}\n")
    algorithm = AlgorithmConfig.model_validate({kind: {"name": f"{file}:f"}})
    if not message:
        try_functions(algorithm, has_critic=False)
        return
    with pytest.raises(ConfigError, match=message):
        try_functions(algorithm, has_critic=False)


def test_an_advantage_of_a_user_is_tried_with_the_parts_of_the_reward_that_it_names(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def f(inputs, config):\n"
        "    parts = inputs.reward_parts\n"
        "    return (parts['answer'] - 0.5 * parts['format'])[inputs.sequence_ids]\n"
    )
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name=f"{file}:f", reward_keys=("answer", "format")))
    try_functions(algorithm, has_critic=False)
    forgotten = AlgorithmConfig(advantage=AdvantageConfig(name=f"{file}:f", reward_keys=("answer",)))
    with pytest.raises(ConfigError, match="fails on a small batch: KeyError: 'format'"):
        try_functions(forgotten, has_critic=False)


def test_a_plain_tensor_of_a_user_is_masked_and_counted(tmp_path: Path) -> None:
    """Masked-out tokens reach neither the result nor the gradient, whatever the function returns there."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def loss(inputs, config):\n    return -inputs.log_probs * inputs.advantages\n\n"
        "def advantage(inputs, config):\n    return inputs.token_rewards + 1\n"
    )
    mask, ids = torch.tensor([1, 0, 1]), torch.tensor([0, 0, 1])
    log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    nan = torch.tensor([2.0, torch.nan, 2.0])
    outputs = policy_loss(LossInputs(log_probs, torch.zeros(3), nan, mask, ids), LossConfig(name=f"{file}:loss"))
    assert outputs.per_token.tolist() == [2.0, 0.0, 6.0]
    statistics = outputs.statistics
    assert (int(statistics.num_tokens), statistics.mean_of(statistics.sum_negative_log_ratio)) == (2, 2.0)
    advantages = compute_advantages(
        AdvantageInputs(nan, mask, ids, torch.tensor([5, 5])), AdvantageConfig(name=f"{file}:advantage")
    )
    assert advantages.advantages.tolist() == [3.0, 0.0, 3.0] and advantages.loss_mask.tolist() == [True, False, True]
