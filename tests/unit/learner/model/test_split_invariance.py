"""Loss and gradient of the real model do not depend on how a batch is split, ordered and packed.

One process computes the micro-batches of all ranks and sums their gradients. Real ranks get the same sum: each
multiplies its loss by the number of ranks, and FSDP averages the gradients.
tests/integration/learner/test_learner_run.py compares runs with several real ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.loading import validate
from penstock_learner.batches.partition import RankShard, partition
from penstock_learner.batches.sequence_batch import SequenceBatch, batch_of
from penstock_learner.model.published_layout import full_weight
from penstock_learner.roles.critic import CriticWorker
from penstock_learner.roles.policy import PolicyWorker
from penstock_learner.steps.program import denominators_of, with_advantages
from support.groups import make_group
from support.learner_ranks import make_rank, with_model

ALGORITHM: dict[str, Any] = {
    "advantage": {"name": "gae", "lam": 0.9},
    "correction": {"mode": "decoupled", "rejection": "sequence", "rejection_low": 1e-4, "rejection_high": 1e4},
    "kl": {"placement": "loss"},
}
TOLERANCE = 1e-5
pytestmark = pytest.mark.usefixtures("one_rank")


def ranks(tiny_models: dict[str, Path], loss: dict[str, Any]) -> tuple[PolicyWorker, CriticWorker]:
    """Workers that compute gradients and do not change their weights."""
    learner = {
        "algorithm": ALGORITHM
        | {"loss": loss, "value_loss": {"aggregation": loss["aggregation"], "constant_length": 8}},
        "critic": {"path": str(tiny_models["scalar"]), "lr": 1e-30},
        "lr": 1e-30,
        "max_grad_norm": 1e30,
    }
    config = validate(with_model({"learner": learner}, tiny_models["policy"]), "test")
    return make_rank(PolicyWorker, config), make_rank(CriticWorker, config)


def some_batch(policy: PolicyWorker, critic: CriticWorker) -> SequenceBatch:
    """Sequences of several lengths with tool output, and with the fields that forward passes fill in."""
    prompt = np.random.default_rng(5).integers(2, 64, 18).astype(np.int32)
    groups = [make_group(prompt_id, num_samples=3) for prompt_id in (1, 2, 3)]
    batch = batch_of([replace(group, prompt_token_ids=prompt[: 15 + group.prompt_id]) for group in groups])
    random = np.random.default_rng(0)
    mask = (random.random(len(batch.loss_mask)) < 0.8).astype(np.uint8)
    near = batch.behaviour_log_probs
    batch = replace(
        batch,
        loss_mask=mask,
        old_log_probs=(near + 0.1 * random.normal(size=len(mask))).astype(np.float32),
        reference_log_probs=(near + 0.1 * random.normal(size=len(mask))).astype(np.float32),
        values=random.normal(size=len(mask)).astype(np.float32),
    )
    return with_advantages(batch, policy.config.learner.algorithm, 0.1)


def joined(batch: SequenceBatch, num_ranks: int, max_tokens: int, *, shared: bool) -> RankShard:
    """The micro-batches of all ranks as those of one rank, including those without a sequence of their own."""
    shards = partition(batch, num_ranks, max_tokens, shares_prefixes=shared)
    assert all(shard.shares_prefixes == shared for shard in shards)
    return RankShard(
        [micro for shard in shards for micro in shard.micro_batches],
        [part for s in shards for part in s.sequences],
        shares_prefixes=shared,
    )


def gradient(worker: PolicyWorker | CriticWorker) -> torch.Tensor:
    return torch.cat([full_weight(p.grad).flatten() for p in worker.model.parameters() if p.grad is not None])


def update(
    policy: PolicyWorker,
    critic: CriticWorker,
    batch: SequenceBatch,
    num_ranks: int,
    max_tokens: int,
    *,
    shared: bool = False,
) -> tuple[list[float], list[torch.Tensor]]:
    denominators = denominators_of(batch, policy.config.learner.algorithm.loss)
    part = joined(batch, num_ranks, max_tokens, shared=shared)
    losses = [policy.update(part, denominators, 1, 0, 0.1).loss, critic.update(part, denominators, 1).loss]
    return losses, [gradient(policy), gradient(critic)]


@pytest.mark.parametrize(
    "num_examples", [pytest.param(6, id="few"), pytest.param(12, id="many", marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    "loss",
    [
        {"name": "ppo", "aggregation": "token-mean", "constant_length": 8},
        {"name": "gspo", "aggregation": "seq-mean-token-mean", "clip_low": 0.5, "clip_high": 0.5, "constant_length": 8},
        {"name": "cispo", "aggregation": "seq-mean-token-sum-norm", "constant_length": 8},
    ],
    ids=lambda loss: str(loss["name"]),
)
def test_loss_and_gradient_do_not_depend_on_split_packing_or_ranks(
    loss: dict[str, Any], num_examples: int, tiny_models: dict[str, Path]
) -> None:
    policy, critic = ranks(tiny_models, loss)
    batch = some_batch(policy, critic)
    losses, gradients = update(policy, critic, batch, 1, 10**6)
    assert all(abs(loss) > 1e-4 for loss in losses)
    scales = [float(g.abs().max()) for g in gradients]
    assert all(scale > 1e-3 for scale in scales)

    @settings(max_examples=num_examples, deadline=None)
    @given(
        order=st.permutations(range(batch.num_sequences)),
        num_ranks=st.integers(1, 11),
        max_tokens=st.integers(8, 80),
        shared=st.booleans(),
    )
    def check(order: list[int], num_ranks: int, max_tokens: int, shared: bool) -> None:
        again, others = update(policy, critic, batch.select(order), num_ranks, max_tokens, shared=shared)
        assert again == pytest.approx(losses, abs=TOLERANCE)
        for other, first, scale in zip(others, gradients, scales, strict=True):
            assert float((other - first).abs().max()) <= TOLERANCE * max(scale, 1.0)

    check()


def test_a_denominator_of_the_part_would_be_noticed(tiny_models: dict[str, Path]) -> None:
    """Shows that the test above can fail: it does if the loss is divided by each micro-batch's own tokens."""
    policy, critic = ranks(tiny_models, {"name": "ppo", "aggregation": "token-mean", "constant_length": 8})
    batch = some_batch(policy, critic)
    (whole, _), _ = update(policy, critic, batch, 1, 10**6)
    parts = [batch.select([0, 1]), batch.select(range(2, batch.num_sequences))]
    own = [update(policy, critic, part, 1, 10**6)[0][0] for part in parts]
    assert abs(sum(own) / 2 - whole) > 100 * TOLERANCE
