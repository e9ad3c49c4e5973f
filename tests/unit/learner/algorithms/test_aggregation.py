"""Aggregations equal numbers worked out by hand, and a loss does not depend on how its batch is split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.config.algorithms import Aggregation, CorrectionConfig, LossConfig
from penstock_learner.algorithms.aggregation import Denominators, aggregate
from penstock_learner.algorithms.losses import LOSSES, LossInputs, correct, kl_penalty, policy_loss

MODES: tuple[Aggregation, ...] = get_args(Aggregation)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1 + 2 + 3 + 4 + 6) / 5),
        ("seq-mean-token-sum", (3 + 3 + 10) / 3),
        ("seq-mean-token-mean", (1.5 + 3 + 5) / 3),
        ("seq-mean-token-sum-norm", (3 + 3 + 10) / 3 / 10),
    ],
)
def test_modes_by_hand(mode: Aggregation, expected: float) -> None:
    per_token = torch.tensor([1.0, 2, 3, 4, 5, 6, 7])
    mask, ids = torch.tensor([1, 1, 1, 1, 0, 1, 0]), torch.tensor([0, 0, 1, 2, 2, 2, 3])
    denominators = Denominators.of(mask, ids, constant_length=10)
    assert denominators == Denominators(num_tokens=5, num_sequences=3, constant_length=10)
    assert aggregate(per_token, mask, ids, mode, denominators).item() == pytest.approx(expected)


def test_norm_needs_its_length() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="constant_length"):
        aggregate(one, one, torch.zeros(1, dtype=torch.int64), "seq-mean-token-sum-norm", Denominators(1, 1))


@pytest.mark.parametrize("mode", MODES)
def test_a_micro_batch_without_trained_tokens_is_zero_and_still_differentiable(mode: Aggregation) -> None:
    for num_tokens in (0, 2):
        per_token = torch.full((num_tokens,), torch.nan, requires_grad=True)
        empty = torch.zeros(num_tokens, dtype=torch.int64)
        loss = aggregate(per_token, empty, empty, mode, Denominators.of(empty, empty, 10))
        loss.backward()
        assert loss.item() == 0
        assert per_token.grad is not None
        assert per_token.grad.tolist() == [0] * num_tokens


@dataclass
class Batch:
    """The tensors of S sequences as a list, which a test can split and reorder."""

    log_probs: list[Tensor]
    old: list[Tensor]
    behaviour: list[Tensor]
    ref: list[Tensor]
    advantages: list[Tensor]
    mask: list[Tensor]


def random_batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (int(torch.randint(1, 9, (), generator=generator)),), generator=generator).tolist()

    def near(base: list[Tensor], scale: float) -> list[Tensor]:
        return [tensor + scale * torch.randn(tensor.shape, generator=generator) for tensor in base]

    old = [-3 * torch.rand(length, generator=generator) for length in lengths]
    return Batch(
        log_probs=near(old, 0.3),
        old=old,
        behaviour=near(old, 0.5),
        ref=near(old, 0.5),
        advantages=near([torch.zeros(length) for length in lengths], 1.0),
        mask=[torch.rand(length, generator=generator) < 0.7 for length in lengths],
    )


def loss_of(batch: Batch, sequences: list[int], config: LossConfig, denominators: Denominators) -> Tensor:
    """The training loss of a micro-batch, composed as in the learner: policy loss, correction, KL."""

    def pack(tensors: list[Tensor]) -> Tensor:
        return torch.cat([tensors[s] for s in sequences])

    lengths = torch.tensor([len(batch.mask[s]) for s in sequences])
    ids = torch.repeat_interleave(torch.arange(len(sequences)), lengths)
    log_probs, old, behaviour, mask = pack(batch.log_probs), pack(batch.old), pack(batch.behaviour), pack(batch.mask)
    policy = policy_loss(LossInputs(log_probs, old, pack(batch.advantages), mask, ids, behaviour), config).per_token
    correction = correct(old, behaviour, mask, ids, CorrectionConfig(rejection="sequence", rejection_high=3))
    kl = torch.where(correction.kept, kl_penalty(log_probs, pack(batch.ref), mask, "k3"), 0.0)
    per_token = correction.apply(policy) + 0.1 * kl
    return aggregate(per_token, mask, ids, config.aggregation_mode, denominators)


def loss_and_gradient(batch: Batch, parts: list[list[int]], config: LossConfig) -> tuple[float, Tensor]:
    """The loss summed over the parts, and the gradient in the order of the batch."""
    leaves = [tensor.clone().requires_grad_() for tensor in batch.log_probs]
    split = Batch(leaves, batch.old, batch.behaviour, batch.ref, batch.advantages, batch.mask)
    ids = torch.repeat_interleave(torch.arange(len(leaves)), torch.tensor([len(leaf) for leaf in leaves]))
    denominators = Denominators.of(torch.cat(batch.mask), ids, constant_length=8)
    total = 0.0
    for sequences in parts:
        loss = loss_of(split, sequences, config, denominators)
        loss.backward()
        total += loss.item()
    return total, torch.cat([leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves])


def random_split(num_sequences: int, num_parts: int, seed: int) -> list[list[int]]:
    """The sequences in random order, split over ranks and micro-batches of any size. Empty ones are left out."""
    generator = torch.Generator().manual_seed(seed)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for s in torch.randperm(num_sequences, generator=generator).tolist():
        parts[int(torch.randint(0, num_parts, (), generator=generator))].append(s)
    return [part for part in parts if part]


@pytest.mark.parametrize(
    "num_examples", [pytest.param(8, id="few"), pytest.param(25, id="many", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("clip_cov", "kl_cov")])
def test_loss_and_gradient_do_not_depend_on_split_order_or_ranks(
    name: str, mode: Aggregation, num_examples: int
) -> None:
    config = LossConfig(name=name, aggregation=mode, constant_length=8, dro_beta=0.5)

    @settings(max_examples=num_examples, deadline=None)
    @given(seed=st.integers(0, 2**31), num_parts=st.integers(1, 6))
    def check(seed: int, num_parts: int) -> None:
        batch = random_batch(seed)
        whole, whole_gradient = loss_and_gradient(batch, [list(range(len(batch.mask)))], config)
        total, gradient = loss_and_gradient(batch, random_split(len(batch.mask), num_parts, seed), config)
        assert total == pytest.approx(whole, abs=1e-5, rel=1e-5)
        torch.testing.assert_close(gradient, whole_gradient, atol=1e-6, rtol=1e-5)

    check()


def test_denominators_of_ranks_add_up_to_those_of_the_batch() -> None:
    mask, ids = torch.tensor([1, 0, 1, 1, 0, 1]), torch.tensor([0, 0, 1, 1, 2, 3])
    first = Denominators.of(mask[:4], ids[:4], 9)
    second = Denominators.of(mask[4:], ids[4:] - 2, 9)
    assert Denominators.of(mask, ids, 9) == Denominators(4, 3, 9)
    assert (first.num_tokens + second.num_tokens, first.num_sequences + second.num_sequences) == (4, 3)


def test_rejection_does_not_shrink_the_denominator() -> None:
    old, behaviour = torch.tensor([0.0, 0.0, 0.0, 0.0]), torch.tensor([0.0, 2.0, 0.0, 0.0])
    mask, ids = torch.ones(4), torch.tensor([0, 0, 0, 1])
    correction = correct(old, behaviour, mask, ids, CorrectionConfig(rejection="token"))
    weighted = correction.apply(torch.full((4,), 6.0))
    denominators = Denominators.of(mask, ids)
    assert aggregate(weighted, mask, ids, "token-mean", denominators).item() == pytest.approx(18 / 4)
    assert aggregate(weighted, mask, ids, "seq-mean-token-mean", denominators).item() == pytest.approx((12 / 3 + 6) / 2)
