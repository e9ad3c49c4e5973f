"""Advantage estimators equal numbers worked out by hand, and scalar loops on random packed batches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.config.algorithms import AdvantageConfig
from penstock_learner.algorithms.advantages import ADVANTAGES, AdvantageInputs, compute_advantages

NAN = math.nan


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch(
    rewards: list[list[float]],
    groups: list[int],
    mask: list[list[int]] | None = None,
    values: list[list[float]] | None = None,
    is_greedy: list[bool] | None = None,
) -> AdvantageInputs:
    flat_mask = [1] * sum(map(len, rewards)) if mask is None else [m for row in mask for m in row]
    return AdvantageInputs(
        token_rewards=tensor([r for row in rewards for r in row]),
        mask=torch.tensor(flat_mask, dtype=torch.bool),
        sequence_ids=torch.tensor([s for s, row in enumerate(rewards) for _ in row]),
        group_ids=torch.tensor(groups),
        values=None if values is None else tensor([v for row in values for v in row]),
        is_greedy=None if is_greedy is None else torch.tensor(is_greedy),
    )


def advantages(inputs: AdvantageInputs, name: str, **options: float) -> list[float]:
    config = AdvantageConfig.model_validate({"name": name, **options})
    return compute_advantages(inputs, config).advantages.tolist()


def config_of(name: str) -> AdvantageConfig:
    return AdvantageConfig(name=name, gamma=0.9, lam=0.8, reward_keys=("right",) if name == "gdpo" else ())


def near(expected: list[float], tolerance: float = 1e-7) -> object:
    return pytest.approx(expected, abs=tolerance)


def test_grpo_normalizes_within_each_group_and_keeps_tool_output_at_zero() -> None:
    inputs = batch([[0, 99, 1], [0, 0], [4], [0, 2]], [7, 7, 9, 9], mask=[[1, 0, 1], [1, 1], [1], [1, 1]])
    low, high = 0.5 / (0.7071067811865476 + 1e-6), 1 / (1.4142135623730951 + 1e-6)
    assert low == pytest.approx(0.70710578)
    assert advantages(inputs, "grpo") == near([low, 0, low, -low, -low, high, -high, -high], 1e-12)


def test_dr_grpo_only_centers() -> None:
    inputs = batch([[1], [0, 0], [5]], [3, 3, 3])
    assert advantages(inputs, "grpo", normalize_by_std=False) == near([-1, -2, -2, 3])


def test_grpo_group_of_one_keeps_its_reward() -> None:
    inputs = batch([[3], [1], [0]], [5, 6, 6])
    outputs = compute_advantages(inputs, AdvantageConfig(name="grpo"))
    assert outputs.advantages[0].item() == pytest.approx(3 / (1 + 1e-6), abs=1e-12)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_a_sequence_without_a_trained_token_does_not_count_in_its_group(name: str) -> None:
    """Rewards 1 and 3, and a third sample that is masked out: as if it were not there, not as if its reward were 0."""
    masked = batch([[1], [9, 9], [3, 0]], [4, 4, 4], mask=[[1], [0, 0], [1, 1]])
    without = batch([[1], [3, 0]], [4, 4])
    first, *of_masked, second, third = advantages(masked, name)
    assert of_masked == [0, 0]
    assert [first, second, third] == near(advantages(without, name), 1e-12)
    assert first < 0 < second


@pytest.mark.parametrize(("name", "expected"), [("grpo", 3 / (1 + 1e-6)), ("rloo", 0), ("opo", 0)])
def test_the_only_trained_sequence_of_a_group_is_a_group_of_one(name: str, expected: float) -> None:
    inputs = batch([[9], [3], [9, 9], [1], [0]], [4, 4, 4, 5, 5], mask=[[0], [1], [0, 0], [1], [1]])
    outputs = compute_advantages(inputs, AdvantageConfig.model_validate({"name": name}))
    assert outputs.advantages.tolist()[:4] == near([0, expected, 0, 0], 1e-12)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_a_group_without_a_trained_token_has_no_advantage_and_harms_no_other(name: str) -> None:
    inputs = batch([[9], [9, 9], [1], [0]], [4, 4, 5, 5], mask=[[0], [0, 0], [1], [1]])
    outputs = compute_advantages(inputs, AdvantageConfig.model_validate({"name": name}))
    assert outputs.advantages.tolist()[:3] == [0, 0, 0]
    assert outputs.advantages.tolist()[3:] == near(advantages(batch([[1], [0]], [5, 5]), name), 1e-12)


def test_remax_has_no_advantage_where_the_greedy_sample_is_masked_out() -> None:
    inputs = batch([[7], [3], [2], [5]], [8, 8, 9, 9], mask=[[0], [1], [1], [1]], is_greedy=[True, False, True, False])
    outputs = compute_advantages(inputs, AdvantageConfig(name="remax"))
    assert outputs.advantages.tolist() == [0, 0, 0, 5 - 2]
    assert outputs.loss_mask.tolist() == [False, True, False, True]


def sum_in_order(values: Tensor) -> Tensor:
    """A sum that rounds after each addition, unlike torch.sum."""
    total = torch.zeros((), dtype=values.dtype)
    for value in values:
        total = total + value
    return total


def test_grpo_of_equal_rewards_is_exactly_zero_in_float32() -> None:
    rewards, ids = torch.full((7,), 0.1), torch.arange(7)
    assert sum_in_order(rewards) / 7 != rewards[0]
    inputs = AdvantageInputs(rewards, torch.ones(7), ids, torch.zeros(7, dtype=torch.int64))
    assert compute_advantages(inputs, AdvantageConfig(name="grpo")).advantages.tolist() == [0] * 7


def test_rloo_is_the_reward_less_the_mean_of_the_others() -> None:
    assert advantages(batch([[1], [0], [2, 3]], [0, 0, 0]), "rloo") == near([1 - 2.5, 0 - 3, 5 - 0.5, 5 - 0.5])


def test_rloo_group_of_one_is_zero() -> None:
    outputs = compute_advantages(batch([[3, 2], [1], [0]], [5, 6, 6]), AdvantageConfig(name="rloo"))
    assert outputs.advantages.tolist() == [0, 0, 1, -1]


def test_opo_weighs_the_baseline_by_length() -> None:
    inputs = batch([[0, 99, 1], [0], [1, 2, 2]], [4, 4, 4], mask=[[1, 0, 1], [1], [1, 1, 1]])
    baseline = (2 * 1 + 1 * 0 + 3 * 5) / (2 + 1 + 3)
    a, b, c = 1 - baseline, -baseline, 5 - baseline
    assert [a, b, c] == near([-1.83333333, -2.83333333, 2.16666667], 1e-8)
    assert advantages(inputs, "opo") == near([a, 0, a, b, c, c, c])


def test_opo_group_of_one_is_zero() -> None:
    assert advantages(batch([[3, 2], [1], [0]], [5, 6, 6]), "opo") == near([0, 0, 0.5, -0.5])


def test_reinforce_plus_plus_discounts_trained_tokens_only() -> None:
    inputs = batch([[1, 99, 2], [5]], [0, 1], mask=[[1, 0, 1], [1]])
    outputs = compute_advantages(inputs, AdvantageConfig(name="reinforce_plus_plus", gamma=0.5))
    assert outputs.returns is not None
    assert outputs.returns.tolist() == near([2, 0, 2, 5])
    assert outputs.advantages.tolist() == near([-0.57735027, 0, -0.57735027, 1.15470054])


def test_reinforce_plus_plus_baseline_whitens_over_tokens() -> None:
    inputs = batch([[0, 1], [3]], [2, 2])
    assert advantages(inputs, "reinforce_plus_plus_baseline") == near([-0.57735027, -0.57735027, 1.15470054])


def test_remax_subtracts_the_greedy_reward_and_drops_the_greedy_sample_from_the_loss() -> None:
    inputs = batch([[0, 2], [1, 99, 3]], [8, 8], mask=[[1, 1], [1, 0, 1]], is_greedy=[True, False])
    outputs = compute_advantages(inputs, AdvantageConfig(name="remax"))
    assert outputs.advantages.tolist() == [0, 0, 4 - 2, 0, 3 - 2]
    assert outputs.loss_mask.tolist() == [False, False, True, False, True]


@pytest.mark.parametrize("is_greedy", [[False, False, True], [True, True, True]])
def test_remax_refuses_a_group_without_exactly_one_greedy_sample(is_greedy: list[bool]) -> None:
    inputs = batch([[1], [2], [3]], [8, 8, 9], is_greedy=is_greedy)
    with pytest.raises(ValueError, match=r"exactly one greedy sample.*\[8\]"):
        compute_advantages(inputs, AdvantageConfig(name="remax"))


def test_gae_carries_value_and_advantage_over_tool_output() -> None:
    inputs = batch(
        [[0.5, 99, 1], [0]], [0, 1], mask=[[1, 0, 1], [1]], values=[[0.2, -99, 0.4], [1.0]]
    )  # A_2 = 1 - 0.4 = 0.6; A_0 = 0.5 + 0.9 * 0.4 - 0.2 + 0.72 * 0.6 = 1.092; A of the second sequence = -1
    outputs = compute_advantages(inputs, AdvantageConfig(name="gae", gamma=0.9, lam=0.8))
    assert outputs.returns is not None
    assert outputs.returns.tolist() == near([1.292, 0, 1.0, 0])
    mean = (1.092 + 0.6 - 1) / 3
    std = math.sqrt(sum((a - mean) ** 2 for a in (1.092, 0.6, -1)) / 2 + 1e-8)
    assert std == pytest.approx(1.0938105, abs=1e-6)
    expected = [(1.092 - mean) / std, 0, (0.6 - mean) / std, (-1 - mean) / std]
    assert outputs.advantages.tolist() == near(expected, 1e-12)


def test_an_estimator_says_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="gae needs values"):
        compute_advantages(batch([[1]], [0]), AdvantageConfig(name="gae"))
    with pytest.raises(ValueError, match="remax needs is_greedy"):
        compute_advantages(batch([[1]], [0]), AdvantageConfig(name="remax"))


def test_inputs_refuse_interleaved_sequences_and_wrong_shapes() -> None:
    with pytest.raises(ValueError, match="non-decreasing"):
        AdvantageInputs(torch.zeros(3), torch.ones(3), torch.tensor([0, 1, 0]), torch.zeros(2))
    with pytest.raises(ValueError, match="mask has shape"):
        AdvantageInputs(torch.zeros(3), torch.ones(2), torch.tensor([0, 0, 1]), torch.zeros(2))


def random_batch(seed: int) -> AdvantageInputs:
    """Sequences of 1 to 7 tokens with masked-out ones. Groups have a greedy sample and 0 to 3 others, interleaved."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 5, (3,), generator=generator).tolist()
    members = [(group, i == 0) for group, size in enumerate(sizes) for i in range(size)]
    order = torch.randperm(len(members), generator=generator).tolist()
    lengths = torch.randint(1, 8, (len(members),), generator=generator)
    num_tokens = int(lengths.sum())
    return AdvantageInputs(
        token_rewards=torch.randn(num_tokens, generator=generator, dtype=torch.float64),
        mask=torch.rand(num_tokens, generator=generator) < 0.7,
        sequence_ids=torch.repeat_interleave(torch.arange(len(members)), lengths),
        group_ids=torch.tensor([10 * members[i][0] for i in order]),
        values=torch.randn(num_tokens, generator=generator, dtype=torch.float64),
        is_greedy=torch.tensor([members[i][1] for i in order]),
        reward_parts={"right": torch.randn(len(members), generator=generator, dtype=torch.float64)},
    )


def trained_tokens(inputs: AdvantageInputs) -> list[list[int]]:
    """Positions of the trained tokens of each sequence."""
    positions: list[list[int]] = [[] for _ in range(inputs.num_sequences)]
    for t, (s, m) in enumerate(zip(inputs.sequence_ids.tolist(), inputs.mask.tolist(), strict=True)):
        if m:
            positions[s].append(t)
    return positions


def whitened(raw: dict[int, float]) -> dict[int, float]:
    if not raw:
        return raw
    mean = sum(raw.values()) / len(raw)
    variance = sum((x - mean) ** 2 for x in raw.values()) / max(len(raw) - 1, 1)
    return {t: (x - mean) / math.sqrt(variance + 1e-8) for t, x in raw.items()}


def gae_by_definition(inputs: AdvantageInputs, gamma: float, lam: float) -> dict[int, float]:
    """A_t as the sum of all later errors, each with its own discount. Quadratic, without recurrence or packing."""
    assert inputs.values is not None
    rewards, values = inputs.token_rewards.tolist(), inputs.values.tolist()
    raw = {}
    for positions in trained_tokens(inputs):
        chain = [values[t] for t in positions] + [0.0]
        deltas = [rewards[t] + gamma * chain[i + 1] - chain[i] for i, t in enumerate(positions)]
        for i, t in enumerate(positions):
            raw[t] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(deltas)))
    return raw


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), gamma=st.sampled_from([1.0, 0.9, 0.0]), lam=st.sampled_from([1.0, 0.95, 0.0]))
def test_gae_agrees_with_its_definition(seed: int, gamma: float, lam: float) -> None:
    inputs = random_batch(seed)
    assert inputs.values is not None
    raw = gae_by_definition(inputs, gamma, lam)
    outputs = compute_advantages(inputs, AdvantageConfig(name="gae", gamma=gamma, lam=lam))
    num_tokens = inputs.mask.shape[0]
    white, values = whitened(raw), inputs.values.tolist()
    assert outputs.returns is not None
    assert outputs.advantages.tolist() == near([white.get(t, 0.0) for t in range(num_tokens)], 1e-8)
    assert outputs.returns.tolist() == near([raw[t] + values[t] if t in raw else 0.0 for t in range(num_tokens)], 1e-8)


def outcome_by_definition(inputs: AdvantageInputs, name: str) -> list[float]:
    """One advantage for each sequence, by the textbook formula of the group estimators."""
    positions, rewards = trained_tokens(inputs), inputs.token_rewards.tolist()
    totals = [sum(rewards[t] for t in tokens) for tokens in positions]
    groups = inputs.group_ids.tolist()
    result = []
    for s, total in enumerate(totals):
        others = [r for i, r in enumerate(totals) if groups[i] == groups[s] and i != s and positions[i]]
        members = [*others, total]
        mean = sum(members) / len(members)
        if name == "rloo":
            result.append(total - sum(others) / len(others) if others else 0.0)
        elif name == "grpo":
            std = math.sqrt(sum((r - mean) ** 2 for r in members) / len(others)) if others else 1.0
            result.append((total - (mean if others else 0.0)) / (std + 1e-6))
        else:
            result.append(total - (mean if others else 0.0))
    return result


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), name=st.sampled_from(["grpo", "rloo", "reinforce_plus_plus_baseline"]))
def test_group_estimators_agree_with_their_definitions(seed: int, name: str) -> None:
    inputs = random_batch(seed)
    per_sequence = outcome_by_definition(inputs, name)
    expected = {t: per_sequence[s] for s, tokens in enumerate(trained_tokens(inputs)) for t in tokens}
    if name == "reinforce_plus_plus_baseline":
        expected = whitened(expected)
    assert advantages(inputs, name) == near([expected.get(t, 0.0) for t in range(inputs.mask.shape[0])], 1e-6)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
@pytest.mark.parametrize("name", ADVANTAGES)
def test_masked_tokens_do_not_matter(name: str, seed: int) -> None:
    inputs = random_batch(seed)
    assert inputs.values is not None
    spoiled = AdvantageInputs(
        token_rewards=inputs.token_rewards.masked_fill(~inputs.mask, NAN),
        mask=inputs.mask.to(torch.float32),
        sequence_ids=inputs.sequence_ids,
        group_ids=inputs.group_ids,
        values=inputs.values.masked_fill(~inputs.mask, math.inf),
        is_greedy=inputs.is_greedy,
        reward_parts=inputs.reward_parts,
    )
    config = config_of(name)
    clean, dirty = compute_advantages(inputs, config), compute_advantages(spoiled, config)
    assert clean.advantages.tolist() == dirty.advantages.tolist()
    assert clean.advantages[~inputs.mask].tolist() == [0.0] * int((~inputs.mask).sum())
    assert clean.returns is None or dirty.returns is None or clean.returns.tolist() == dirty.returns.tolist()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_order_of_sequences_does_not_matter(name: str, seed: int) -> None:
    inputs = random_batch(seed)
    assert inputs.values is not None
    assert inputs.is_greedy is not None
    order = torch.randperm(inputs.num_sequences, generator=torch.Generator().manual_seed(seed)).tolist()
    tokens = torch.cat([(inputs.sequence_ids == s).nonzero().squeeze(1) for s in order])
    lengths = torch.tensor([int((inputs.sequence_ids == s).sum()) for s in order])
    permuted = AdvantageInputs(
        token_rewards=inputs.token_rewards[tokens],
        mask=inputs.mask[tokens],
        sequence_ids=torch.repeat_interleave(torch.arange(len(order)), lengths),
        group_ids=inputs.group_ids[order],
        values=inputs.values[tokens],
        is_greedy=inputs.is_greedy[order],
        reward_parts={name: part[order] for name, part in inputs.reward_parts.items()},
    )
    config = config_of(name)
    expected = compute_advantages(inputs, config).advantages[tokens]
    torch.testing.assert_close(compute_advantages(permuted, config).advantages, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["grpo", "rloo", "gpg", "grpo_passk"])
@pytest.mark.parametrize("by_std", [True, False])
def test_paths_of_an_episode_count_as_one_sample(name: str, by_std: bool) -> None:
    """Two sessions, one of which has three paths with its reward, are compared as two samples are."""
    options = {"normalize_by_std": by_std} if name in ("grpo", "grpo_passk") else {}
    one = advantages(batch([[1.0], [4.0], [2.0], [7.0]], [7, 7, 7, 9]), name, **options)
    paths = batch([[1.0], [4.0], [4.0], [4.0], [2.0], [7.0], [7.0]], [7] * 5 + [9] * 2)
    joined = replace(paths, episodes=torch.tensor([0, 2, 2, 2, 0, 1, 1]))
    expected = [one[place] for place in (0, 1, 1, 1, 2, 3, 3)]
    assert advantages(joined, name, **options) == near(expected)
    if name != "gpg":
        assert advantages(paths, name, **options) != near(expected), "without episodes they would not"
