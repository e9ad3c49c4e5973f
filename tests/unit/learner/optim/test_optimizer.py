"""The learning rate over a run, settings that are refused, and updates of weights that are kept on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.config.learner import LearnerConfig
from penstock_learner.optim import optimizer as optimizers
from penstock_learner.optim.optimizer import HostAdamW, ScaledAdamW, learning_rate


def rates(num_steps: int, **settings: Any) -> list[float]:
    learner = LearnerConfig.model_validate({"lr": 1.0, "num_steps": num_steps, **settings})
    return [learning_rate(learner, learner.lr, num_done) for num_done in range(num_steps)]


def test_warm_up_then_constant() -> None:
    """The first step of a warm-up has the rate 0, as with the schedulers of verl and Hugging Face."""
    assert rates(6, warmup_steps=4) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_falls_to_its_share_after_the_last_step() -> None:
    expected = [0.0, 0.5, 1.0, 0.8, 0.6, 0.4]
    assert rates(6, warmup_steps=2, lr_schedule="linear", min_lr_share=0.2) == pytest.approx(expected)


def test_cosine_is_half_way_down_in_the_middle() -> None:
    assert rates(4, lr_schedule="cosine") == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_schedule": "cosine", "num_steps": 0}, "needs num_steps"),
        ({"sequence_parallel": 2, "policy": {"num_ranks": 3}}, "must be a multiple of sequence_parallel"),
        ({"lora": {"rank": 1, "alpha": 1, "target_modules": ["lm_head"]}}, "cannot contain lm_head"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearnerConfig.model_validate(settings)


@pytest.mark.parametrize("moments_on_host", [True, False])
def test_what_an_update_copies_comes_back(moments_on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU copies nothing, so every part is copied here by hand. Buckets of 5 weights cut weights in two."""
    monkeypatch.setattr(optimizers, "BUCKET", 5)
    monkeypatch.setattr(optimizers._Weight, "on", lambda self, _: optimizers._Weight(*(each.clone() for each in self)))
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    shapes, found = ((4, 3), (2,), (7,)), []
    for on_host in (False, True):
        torch.manual_seed(1)
        weights = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        optimizer = (
            HostAdamW(weights, moments_on_host=moments_on_host, **options)
            if on_host
            else ScaledAdamW(weights, **options)
        )
        for scale in (1.0, 0.5, torch.nan, 0.25):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer.step_scaled(torch.tensor(scale))
        moments = [optimizer.state[weight][name] for weight in weights for name in ("exp_avg", "exp_avg_sq", "step")]
        found.append([*weights, *moments])
    assert all(map(torch.equal, *found))
    torch.manual_seed(1)
    assert not any(torch.equal(weight, torch.randn(shape)) for weight, shape in zip(found[1], shapes, strict=False))
