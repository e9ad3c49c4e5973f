"""Advantages, losses, penalties and aggregations are verl's."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config.algorithms import AdvantageConfig, Aggregation, LossConfig, ValueLossConfig
from penstock_learner.algorithms.advantages import AdvantageInputs, compute_advantages
from penstock_learner.algorithms.aggregation import Denominators, aggregate
from penstock_learner.algorithms.losses import LossInputs, kl_penalty, policy_loss, value_loss

VERL = Path(sys.prefix) / "verl"
"""Where `make setup-dev` installs it, so that no other test finds it."""
SEEDS = range(4)
WIDTH = 9
GAMMA, LAM = 0.97, 0.9
AGGREGATIONS: tuple[Aggregation, ...] = (
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm",
)  # fmt: skip


@pytest.fixture(scope="module")
def core() -> Iterator[Any]:
    if not VERL.is_dir():
        pytest.skip(f"there is no {VERL}; make setup-dev installs it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(VERL)])
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # verl sets it
        yield importlib.import_module("verl.trainer.ppo.core_algos")
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]


class Block:
    """Padded sequences of groups with 2 to 4 samples. Some tokens are masked out."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.group_ids = torch.tensor([3, 3, 3, 5, 5, 9, 9, 9, 9])
        lengths = torch.randint(2, WIDTH + 1, (9,), generator=self.generator)
        self.is_token = torch.arange(WIDTH) < lengths[:, None]
        self.mask = (self.is_token & (torch.rand(9, WIDTH, generator=self.generator) < 0.8)).double()
        self.mask[torch.arange(9), lengths - 1] = 1
        self.sequence_ids = self.flat(torch.arange(9)[:, None].expand(9, WIDTH))

    def normal(self, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(9, WIDTH, generator=self.generator, dtype=torch.float64)

    def flat(self, block: Tensor) -> Tensor:
        return block[self.is_token]

    def close(self, packed: Tensor, block: Tensor, tolerance: float = 1e-8) -> None:
        torch.testing.assert_close(packed, self.flat(block * self.mask), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "name", ["gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo", "opo", "grpo_passk", "gpg"]
)
def test_advantages(core: Any, name: str, seed: int) -> None:
    block = Block(seed)
    rewards, values = block.normal() * block.mask, block.normal()
    of_verl = core.get_adv_estimator_fn(name)
    settings = core.AlgoConfig(gamma=GAMMA, lam=LAM)
    if name == "gae":
        expected, returns = of_verl(rewards, values, block.mask, GAMMA, LAM)
    elif name == "reinforce_plus_plus":
        expected, returns = of_verl(rewards.clone(), block.mask, config=settings)
    else:
        expected, returns = of_verl(rewards.clone(), block.mask, block.group_ids.numpy(), config=settings)
    flat = block.flat
    inputs = AdvantageInputs(flat(rewards), flat(block.mask), block.sequence_ids, block.group_ids, flat(values))
    found = compute_advantages(inputs, AdvantageConfig(name=name, gamma=GAMMA, lam=LAM))
    block.close(found.advantages, expected)
    if found.returns is not None:
        block.close(found.returns, returns)


@pytest.mark.parametrize("seed", SEEDS)
def test_gdpo(core: Any, seed: int) -> None:
    block = Block(seed)
    right, short = (block.normal()[:, 0].float() for _ in range(2))
    attention = torch.cat([torch.ones(9, 1), block.is_token], dim=1).long()
    batch = {"prompts": torch.zeros(9, 1), "attention_mask": attention}
    config = core.AlgoConfig(gdpo_reward_keys=["right", "short"], gdpo_reward_weights=[2.0, -0.5])
    expected, _ = core.get_adv_estimator_fn("gdpo")(
        torch.zeros_like(block.mask), block.mask, block.group_ids.numpy(), config=config, batch=batch,
        non_tensor_batch={"right": right.numpy(), "short": short.numpy()},
    )  # fmt: skip
    parts = {"right": right, "short": short}
    nothing = torch.zeros(len(block.sequence_ids), dtype=torch.float64)
    inputs = AdvantageInputs(nothing, block.flat(block.mask), block.sequence_ids, block.group_ids, reward_parts=parts)
    ours = AdvantageConfig(name="gdpo", reward_keys=("right", "short"), reward_weights=(2.0, -0.5))
    block.close(compute_advantages(inputs, ours).advantages, expected, 1e-5)  # verl's parts are float32


def verl_config(**settings: Any) -> Any:
    from verl.workers.config.actor import ActorConfig, PolicyLossConfig

    return ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.2, clip_ratio_high=0.28,
        policy_loss=PolicyLossConfig(dro_beta=0.7), **settings,
    )  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "aggregation"),
    [
        *itertools.product(("ppo", "gspo", "gpg", "cispo", "dppo_tv", "dppo_kl", "dro", "kl_cov"), AGGREGATIONS),
        # verl averages these within sequences, whatever its config says.
        ("sapo", "seq-mean-token-mean"),
        ("geo_mean", "seq-mean-token-mean"),
    ],
)
def test_losses_and_their_gradients(core: Any, name: str, aggregation: Aggregation, seed: int) -> None:
    block = Block(seed)
    old, advantages = -block.normal().abs() - 0.05, block.normal()
    lp = (old + block.normal(0.2 if seed % 2 else 2.0)).clamp(max=-0.01).requires_grad_()
    mode = {"ppo": "vanilla"}.get(name, name)
    expected, _ = core.get_policy_loss_fn(mode)(
        old_log_prob=old, log_prob=lp, advantages=advantages, response_mask=block.mask, loss_agg_mode=aggregation,
        config=verl_config(),
    )  # fmt: skip
    (expected_gradient,) = torch.autograd.grad(expected, lp)
    packed = block.flat(lp).detach().requires_grad_()
    mask = block.flat(block.mask)
    inputs = LossInputs(packed, block.flat(old), block.flat(advantages), mask, block.sequence_ids)
    config = LossConfig(name=name, clip_low=0.2, clip_high=0.28, dro_beta=0.7)
    per_token = policy_loss(inputs, config).per_token
    denominators = Denominators.of(mask, block.sequence_ids, WIDTH)
    found = aggregate(per_token, mask, block.sequence_ids, aggregation, denominators)
    (gradient,) = torch.autograd.grad(found, packed)
    # verl adds 1e-8 to the lengths of sequences, and holds SAPO's temperatures in float32
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    block.close(gradient, expected_gradient, 1e-6)
    if aggregation == "token-mean" and name != "sapo":
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
        block.close(gradient, expected_gradient, 1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_penalties_and_values(core: Any, seed: int) -> None:
    block = Block(seed)
    mask = block.flat(block.mask)
    lp, ref = block.normal(), block.normal(2.0)
    for ours, verl in (("k1", "kl"), ("abs", "abs"), ("k2", "mse"), ("k3", "low_var_kl")):
        block.close(kl_penalty(block.flat(lp), block.flat(ref), mask, ours), core.kl_penalty(lp, ref, verl), 1e-12)
    new, old, returns = block.normal(), block.normal(), block.normal()
    expected, _ = core.compute_value_loss(new, returns, old, block.mask, 0.5, "token-mean")
    parts = [block.flat(tensor) for tensor in (new, old, returns, block.mask)]
    found = value_loss(*parts, ValueLossConfig(clip=0.5))[0].sum() / mask.sum()
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
