"""The critic is trained with its own settings, and with the policy's where it has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.learner import LearnerConfig
from penstock.errors import ConfigError
from penstock_learner.model.loading import is_adapter
from penstock_learner.steps.program import TrainingStep
from penstock_learner.steps.step_result import StepResult
from penstock_learner.term import Term
from support.groups import groups_of
from support.learner_ranks import make_step

pytestmark = pytest.mark.usefixtures("one_rank")
GAE: dict[str, Any] = {"algorithm": {"advantage": {"name": "gae"}}}
SHARED: dict[str, Any] = {
    "minibatches_per_step": 2, "epochs_per_step": 2, "warmup_steps": 3, "weight_decay": 0.1, "max_grad_norm": 0.5,
    "shuffle_minibatches": True,
}  # fmt: skip
OWN = {name: value for name, value in SHARED.items() if name != "shuffle_minibatches"}


def critic_of(step: TrainingStep) -> Any:
    return step.roles["critic"].rank  # type: ignore[attr-defined]


def weights(step: TrainingStep) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in critic_of(step).model.parameters()]


def counted_updates(step: TrainingStep) -> dict[str, list[int]]:
    """Sequences of each update that the step makes from here on, by role."""
    counts: dict[str, list[int]] = {"policy": [], "critic": []}

    def counting(role: str) -> Any:
        rank: Any = step.roles[role].rank  # type: ignore[attr-defined]
        update = rank.update

        def counted(part: Any, *arguments: Any) -> Any:
            counts[role].append(sum(micro.num_sequences for micro in part.micro_batches))
            return update(part, *arguments)

        rank.update = counted

    counting("policy"), counting("critic")
    return counts


async def train(step: TrainingStep, *numbers: int) -> list[StepResult]:
    return [await step.run(groups_of("a", "b", "c"), number, Term()) for number in numbers]


async def test_settings_that_equal_the_policys_change_nothing(tiny_models: dict[str, Path]) -> None:
    shared = make_step(tiny_models, **GAE, **SHARED, critic={"lr": 1e-2})
    repeated = make_step(tiny_models, **GAE, **SHARED, critic={"lr": 1e-2, **OWN})
    before = weights(shared)
    await train(shared, 1, 2)
    await train(repeated, 1, 2)
    assert all(map(torch.equal, weights(shared), weights(repeated)))
    assert not all(map(torch.equal, weights(shared), before))


async def test_the_critic_has_its_own_parts_and_passes(tiny_models: dict[str, Path]) -> None:
    critic = {"minibatches_per_step": 2, "epochs_per_step": 3}
    step = make_step(tiny_models, **GAE, minibatches_per_step=3, critic=critic)
    counts = counted_updates(step)
    await train(step, 1)
    assert counts == {"policy": [4] * 3, "critic": [6] * 6}


async def test_the_critic_has_its_own_warm_up(tiny_models: dict[str, Path]) -> None:
    critic = {"lr": 1e-2, "warmup_steps": 4}
    schedule = {"lr": 1e-3, "num_steps": 6, "lr_schedule": "linear"}
    step = make_step(tiny_models, **GAE, **schedule, critic=critic)
    found = [(metrics["lr"], metrics["critic_lr"]) for metrics in map(StepResult.by_name, await train(step, 1, 3, 6))]
    assert found == [pytest.approx(pair) for pair in ((1e-3, 0.0), (1e-3 * 4 / 6, 5e-3), (1e-3 / 6, 5e-3))]


async def test_the_critic_has_its_own_decay_and_clipping(tiny_models: dict[str, Path]) -> None:
    """Gradients that are clipped to almost nothing leave weight decay alone."""
    critic = {"lr": 1e-2, "weight_decay": 0.5, "max_grad_norm": 1e-20}
    step = make_step(tiny_models, **GAE, lr=1e-2, weight_decay=0.0, critic=critic)
    policy: Any = step.roles["policy"]
    before, before_policy = weights(step), [weight.detach().clone() for weight in policy.rank.model.parameters()]
    (result,) = await train(step, 1)
    for old, new in zip(before, weights(step), strict=True):
        torch.testing.assert_close(new, old * (1 - 1e-2 * 0.5), atol=1e-7, rtol=1e-6)
    moved = [new - old for old, new in zip(before_policy, policy.rank.model.parameters(), strict=True)]
    assert max(float(change.detach().abs().max()) for change in moved) > 5e-3, "the policy takes whole steps"
    assert result.by_name()["critic_grad_norm"] > 1e-20, "the norm is that before clipping"


async def test_a_restart_continues_the_critics_schedule(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    settings = GAE | {"critic": {"lr": 1e-2, "warmup_steps": 4, "epochs_per_step": 2, "weight_decay": 0.1}}
    whole, first, second = (make_step(tiny_models, **settings) for _ in range(3))
    await train(whole, 1, 2, 3)
    await train(first, 1, 2)
    for name in ("policy", "critic"):
        saving: Any = first.roles[name]
        saving.rank.stage(tmp_path / name)
        saving.rank.finish_saving()
        loading: Any = second.roles[name]
        loading.rank.load_checkpoint(tmp_path / name)
    (result,) = await train(second, 3)
    assert result.by_name()["critic_lr"] == pytest.approx(5e-3)
    assert all(map(torch.equal, weights(whole), weights(second)))


@pytest.mark.parametrize("path", ["policy", "scalar"])
async def test_a_critic_with_an_adapter_trains_that_and_its_head(
    path: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """It starts with the values of the critic without one, and a checkpoint continues with the same steps."""
    settings = GAE | {"critic": {"lr": 1e-2, "path": str(tiny_models[path]), "lora": {"rank": 4, "alpha": 8}}}
    whole = make_step(tiny_models, **settings | {"critic": {"path": str(tiny_models[path])}})
    step, second = (make_step(tiny_models, **settings) for _ in range(2))
    names, before = [name for name, _ in critic_of(step).model.named_parameters()], weights(step)
    first, plain = await train(step, 1), await train(whole, 1)
    assert first[0].by_name()["value_mean"] == pytest.approx(plain[0].by_name()["value_mean"], abs=1e-6)
    critic_of(step).stage(tmp_path / "critic")
    critic_of(step).finish_saving()
    critic_of(second).load_checkpoint(tmp_path / "critic")
    await train(step, 2, 3)
    await train(second, 2, 3)
    assert all(map(torch.equal, weights(step), weights(second)))
    moved = {name for name, old, new in zip(names, before, weights(step), strict=True) if not torch.equal(old, new)}
    assert moved == {name for name in names if is_adapter(name) or name.endswith("score.weight")}
    assert len(critic_of(step).optimizer.param_groups[0]["params"]) == len(moved)


def test_an_adapter_that_does_not_fit_the_critic_is_refused(tiny_models: dict[str, Path]) -> None:
    critic = {"lora": {"rank": 4, "alpha": 8, "target_modules": ["no_proj"]}}
    with pytest.raises(ConfigError, match=r"learner\.critic\.lora\.target_modules does not fit the model"):
        make_step(tiny_models, **GAE, critic=critic)


def test_a_schedule_that_ends_within_the_critics_warm_up_is_refused() -> None:
    settings: dict[str, Any] = GAE | {"lr_schedule": "cosine", "num_steps": 10, "warmup_steps": 5}
    LearnerConfig.model_validate(settings | {"critic": {"warmup_steps": 9}})
    with pytest.raises(ValueError, match=r"needs num_steps above critic\.warmup_steps, because it ends at num_steps"):
        LearnerConfig.model_validate(settings | {"critic": {"warmup_steps": 10}})
    own = {"critic": {}, "step": "x.py:f", "roles": {"second": {"worker": "critic", "warmup_steps": 12}}}
    with pytest.raises(ValueError, match=r"above roles\.second\.warmup_steps"):
        LearnerConfig.model_validate(settings | own)


def test_a_role_is_trained_with_its_own_settings_and_the_others_of_the_policy() -> None:
    roles = {"second": {"worker": "critic", "epochs_per_step": 4}}
    settings = GAE | {"critic": {"weight_decay": 0.0}, "step": "x.py:f", "roles": roles, "weight_decay": 0.2}
    learner = LearnerConfig.model_validate(settings)
    assert learner.training_of("policy") is learner
    assert learner.training_of("critic") == learner.model_copy(update={"weight_decay": 0.0})
    assert learner.training_of("second") == learner.model_copy(update={"epochs_per_step": 4})
