"""Advantages, losses, penalties, aggregations and the numbers of a batch are verl's."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.config.algorithms import AdvantageConfig, Aggregation, LossConfig, ValueLossConfig
from penstock_learner.algorithms.advantages import AdvantageInputs, compute_advantages
from penstock_learner.algorithms.aggregation import Denominators, aggregate
from penstock_learner.algorithms.losses import LossInputs, kl_penalty, policy_loss, value_loss
from penstock_learner.batches.sequence_batch import batch_of
from penstock_learner.loggers.step_loggers import under_verl_names
from penstock_learner.optim.optimizer import OptimizerStep
from penstock_learner.roles.dispatch import CriticReport
from penstock_learner.steps.roles import Update
from penstock_learner.steps.step_result import batch_numbers, critic_metrics
from penstock_learner.term import Term
from support.groups import make_group

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


NOT_LOGGED = {
    "prompt_length/clip_ratio", "response/aborted_ratio",
    *(f"response_length_non_aborted/{kind}" for kind in ("mean", "min", "max", "clip_ratio")),
}  # fmt: skip
COUNTED_OTHERWISE = {"response_length/clip_ratio"}


def test_the_numbers_of_a_batch(core: Any) -> None:
    from verl.trainer.ppo import metric_utils

    random = np.random.default_rng(5)
    groups = [make_group(1), make_group(2)]
    # Two turns of the model with an answer of the environment between them, and one turn.
    samples = [sample for group in groups for sample in group.trajectories]
    for index, sample in enumerate(samples):
        sample.loss_mask[1 : 1 + index % 2 * (len(sample.loss_mask) - 2)] = 0
    batch = batch_of(groups)
    num_tokens = len(batch.loss_mask)
    made = {name: random.normal(size=num_tokens).astype(np.float32) for name in ("advantages", "returns", "values")}
    batch = replace(batch, **made)
    numbers, others = batch_numbers(batch, groups, Term())
    report = CriticReport(0.0, OptimizerStep(grad_norm=1.0, lr=1e-6, skipped=False), (), num_clipped=0)
    others |= critic_metrics("critic", [Update("critic", batch, [], [report])], batch)
    times = {"step_s": 4.0, "wait_s": 1.0, "update_s": 2.0, "num_gpus": 2.0}
    clipped = {"clip_ratio_low": 0.0, "clip_ratio_high": 0.0}
    named = under_verl_names(asdict(numbers) | others | times | clipped)

    width, longest = max(batch.response_lengths), max(batch.prompt_lengths)
    is_response = torch.arange(width) < torch.as_tensor(batch.response_lengths)[:, None]
    is_prompt = torch.arange(longest) >= longest - torch.as_tensor(batch.prompt_lengths)[:, None]

    def padded(values: np.ndarray[Any, Any]) -> Tensor:
        block = torch.zeros(is_response.shape, dtype=torch.from_numpy(values).dtype)
        block[is_response] = torch.from_numpy(values)
        return block

    scores = torch.zeros(is_response.shape)
    scores[:, 0] = torch.from_numpy(batch.rewards)
    of_verl = SimpleNamespace(
        batch={
            "responses": torch.zeros(is_response.shape), "prompts": torch.zeros(is_prompt.shape),
            "attention_mask": torch.cat([is_prompt, is_response], dim=1), "response_mask": padded(batch.loss_mask),
            "token_level_scores": scores, "token_level_rewards": scores,
            **{name: padded(values) for name, values in made.items()},
        },
        non_tensor_batch={"__num_turns__": np.array([2 if sample.loss_mask.all() else 4 for sample in samples])},
        meta_info={"global_token_num": batch.lengths.tolist()},
    )  # fmt: skip
    timing = {"gen": 1.0, "update_actor": 2.0, "step": 4.0}
    expected = metric_utils.compute_data_metrics(of_verl, use_critic=True)
    expected |= metric_utils.compute_timing_metrics(of_verl, timing)
    expected |= metric_utils.compute_throughout_metrics(of_verl, timing, n_gpus=2)
    assert expected.keys() - named.keys() == NOT_LOGGED
    assert others["num_turns_max"] == 4 and others["num_turns_min"] == 2
    alike = expected.keys() - NOT_LOGGED - COUNTED_OTHERWISE
    assert {name: named[name] for name in alike} == pytest.approx({name: expected[name] for name in alike}, rel=1e-4)
