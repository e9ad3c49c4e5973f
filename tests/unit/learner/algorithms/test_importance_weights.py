"""Importance weights, rejection and their statistics equal numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from penstock.config.algorithms import CorrectionConfig
from penstock_learner.algorithms import RATIO_EDGES
from penstock_learner.algorithms.losses import Correction, correct, interpolate_log_probs, measure_mismatch

RATIOS = [0.25, 3.0, 1.5, 0.6]
IDS = torch.tensor([0, 0, 0, 1, 1, 1])


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def corrected(ratios: list[float], config: CorrectionConfig, mask: list[int] | None = None) -> Correction:
    numerator = tensor([-1.0] * len(ratios))
    mask_tensor = torch.tensor([1] * len(ratios) if mask is None else mask)
    return correct(numerator, numerator - tensor(ratios).log(), mask_tensor, IDS[: len(ratios)], config)


def near(expected: list[float]) -> object:
    return pytest.approx(expected, abs=1e-12)


def test_token_truncation_and_its_statistics() -> None:
    correction = corrected(RATIOS, CorrectionConfig())
    statistics = correction.statistics
    assert correction.weights.tolist() == near([0.25, 2.0, 1.5, 0.6])
    assert correction.kept.tolist() == [True] * 4
    assert statistics.mean_of(statistics.sum_weights) == pytest.approx(4.35 / 4)
    assert statistics.max_weight.item() == 2.0
    assert statistics.max_ratio.item() == pytest.approx(3.0)
    assert statistics.mean_of(statistics.num_truncated) == 0.25
    assert statistics.mean_of(statistics.num_rejected) == 0
    assert statistics.effective_sample_ratio == pytest.approx(4.35**2 / (4 * (0.0625 + 4 + 2.25 + 0.36)))


def test_ratios_are_counted_by_bucket_and_parts_add_up() -> None:
    config = CorrectionConfig()
    whole = corrected([0.25, 3.0, 1.5, 0.6, 1.0, 99.0], config, mask=[1, 1, 1, 0, 1, 1]).statistics
    parts = corrected([0.25, 3.0, 1.5, 0.6], config, mask=[1, 1, 1, 0]).statistics
    parts = parts + corrected([1.0, 99.0], config).statistics
    for statistics in (whole, parts):
        counts = dict(zip((*RATIO_EDGES, math.inf), statistics.ratio_counts.tolist(), strict=True))
        assert {edge: count for edge, count in counts.items() if count} == {
            0.25: 1,
            1.0: 1,
            2.0: 1,
            4.0: 1,
            math.inf: 1,
        }
        assert statistics.sum_ratio.item() == pytest.approx(0.25 + 3 + 1.5 + 1 + 99)
        expected = sum(ratio - 1 - math.log(ratio) for ratio in (0.25, 3.0, 1.5, 1.0, 99.0)) / 5
        assert statistics.mean_of(statistics.sum_kl) == pytest.approx(expected)


def test_sequence_truncation_gives_one_weight_to_all_tokens() -> None:
    config = CorrectionConfig(weight="sequence_truncation")
    assert corrected(RATIOS, config).weights.tolist() == near([1.125, 1.125, 1.125, 0.6])
    correction = corrected([1.5, 1.6, 1.0, 0.6], config)
    assert correction.weights.tolist() == near([2.0, 2.0, 2.0, 0.6])
    assert correction.statistics.mean_of(correction.statistics.num_truncated) == 0.75


def test_band_zeroes_what_is_outside() -> None:
    correction = corrected([0.25, 3.0, 5.5, 0.6], CorrectionConfig(weight="band"))
    assert correction.weights.tolist() == near([0, 3.0, 0, 0.6])
    assert correction.kept.tolist() == [True] * 4
    assert correction.statistics.mean_of(correction.statistics.num_rejected) == 0.5
    assert correction.statistics.mean_of(correction.statistics.num_truncated) == 0


def test_token_rejection() -> None:
    correction = corrected(RATIOS, CorrectionConfig(rejection="token"))
    assert correction.weights.tolist() == near([0, 0, 1.5, 0.6])
    assert correction.kept.tolist() == [False, False, True, True]
    assert correction.statistics.mean_of(correction.statistics.num_rejected) == 0.5
    assert correction.statistics.mean_of(correction.statistics.num_truncated) == 0


def test_sequence_rejection_is_by_the_product_of_ratios() -> None:
    config = CorrectionConfig(rejection="sequence")
    assert corrected(RATIOS, config).kept.tolist() == [True] * 4
    assert corrected([0.25, 1.0, 1.5, 0.6], config).kept.tolist() == [False, False, False, True]
    assert corrected([1.5, 1.5, 1.0, 0.6], config).kept.tolist() == [False, False, False, True]


@pytest.mark.parametrize("mode", ["bypass", "none"])
def test_other_modes_do_not_weigh_but_may_reject(mode: str) -> None:
    plain = CorrectionConfig.model_validate({"mode": mode})
    rejecting = CorrectionConfig.model_validate({"mode": mode, "rejection": "token"})
    assert corrected(RATIOS, plain).weights.tolist() == [1, 1, 1, 1]
    assert corrected(RATIOS, rejecting).weights.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("weight", ["token_truncation", "sequence_truncation", "band", "none"])
@pytest.mark.parametrize("rejection", ["none", "token", "sequence"])
def test_masked_tokens_do_not_matter(weight: str, rejection: str) -> None:
    config = CorrectionConfig.model_validate({"weight": weight, "rejection": rejection})
    clean = corrected([0.9, 1.0, 1.5, 0.6], config, mask=[1, 0, 1, 1])
    for garbage in (math.nan, math.inf, 1e9):
        dirty = corrected([0.9, garbage, 1.5, 0.6], config, mask=[1, 0, 1, 1])
        assert dirty.weights.tolist() == clean.weights.tolist()
        assert dirty.weights[1].item() == 0
        assert not dirty.kept[1]
        assert all(map(torch.equal, vars(dirty.statistics).values(), vars(clean.statistics).values()))


def test_the_largest_ratio_is_that_of_a_trained_token() -> None:
    statistics = corrected([0.9, 7.0, 0.8, 0.6], CorrectionConfig(), mask=[1, 0, 1, 1]).statistics
    assert statistics.max_ratio.item() == pytest.approx(0.9)


def test_log_ratios_are_bounded() -> None:
    correction = correct(
        tensor([100.0, -100.0]), tensor([0.0, 0.0]), torch.ones(2), torch.tensor([0, 1]), CorrectionConfig(cap=1e30)
    )
    assert correction.weights.tolist() == pytest.approx([math.exp(20), math.exp(-20)])
    assert correction.statistics.effective_sample_ratio == pytest.approx(0.5)


def test_weights_carry_no_gradient_and_a_rejected_token_gets_none() -> None:
    log_probs = tensor([0.0, -2.0, 0.0]).requires_grad_()
    correction = correct(
        log_probs, tensor([-0.5, 0.0, 0.0]), torch.ones(3), IDS[:3], CorrectionConfig(rejection="token")
    )
    per_token = 3 * log_probs * tensor([1.0, 1.0, math.inf])
    correction.apply(per_token)[:2].sum().backward()
    assert not correction.weights.requires_grad
    assert log_probs.grad is not None
    assert log_probs.grad[:2].tolist() == near([3 * math.exp(0.5), 0])


def test_an_infinite_loss_of_a_rejected_token_is_dropped() -> None:
    correction = corrected([9.0, 1.0], CorrectionConfig(rejection="token"))
    assert correction.apply(tensor([math.inf, 2.0])).tolist() == near([0, 2.0])


def test_statistics_of_parts_merge_to_those_of_the_whole() -> None:
    config = CorrectionConfig(rejection="token", rejection_high=4.0)
    whole = corrected(RATIOS, config).statistics
    merged = corrected(RATIOS[:3], config).statistics + corrected(RATIOS[3:], config).statistics
    for name in ("sum_weights", "num_truncated", "num_rejected"):
        assert merged.mean_of(getattr(merged, name)) == pytest.approx(whole.mean_of(getattr(whole, name)))
    assert merged.effective_sample_ratio == pytest.approx(whole.effective_sample_ratio)
    assert merged.max_weight == whole.max_weight == 2
    assert merged.max_ratio == whole.max_ratio


def test_statistics_of_nothing_are_finite() -> None:
    statistics = corrected([], CorrectionConfig()).statistics
    assert (
        statistics.mean_of(statistics.sum_weights),
        statistics.effective_sample_ratio,
        statistics.max_weight.item(),
    ) == (0, 0, 0)


def test_interpolated_proximal_policy() -> None:
    behaviour, current = tensor([-1.0, -2.0]), tensor([-3.0, -1.0]).requires_grad_()
    mixed = interpolate_log_probs(behaviour, current, 0.25)
    assert mixed.tolist() == near([-1.5, -1.75])
    assert not mixed.requires_grad
    assert interpolate_log_probs(behaviour, current, tensor([0.0, 1.0])).tolist() == near([-1.0, -1.0])


def test_mismatch_is_over_trained_tokens_of_the_same_version() -> None:
    learner, behaviour = tensor([-1.0, -2.0, -3.0, math.nan]), tensor([-1.5, -1.0, 9.0, 0.0])
    versions = torch.tensor([4, 4, 3, 4])
    mismatch = measure_mismatch(learner, behaviour, torch.tensor([1, 1, 1, 0]), versions, learner_version=4)
    assert mismatch.mean == pytest.approx((0.5 + 1.0) / 2)
    none = measure_mismatch(learner, behaviour, torch.tensor([1, 1, 1, 0]), versions, learner_version=5)
    assert none.mean is None
    assert (mismatch + none).mean == mismatch.mean
