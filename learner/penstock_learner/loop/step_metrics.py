"""The numbers of one step. They are computed once, for the log, the policy record, the loggers and Prometheus."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

from penstock.trajectory import Group
from penstock_learner.algorithms.corrections import CorrectionStatistics
from penstock_learner.loop.roll_back import RollBack, in_steps
from penstock_learner.metrics import MAX_REWARD_PARTS, REWARD_PART
from penstock_learner.model.packing import SequenceBatch
from penstock_learner.roles.update_reports import CriticReport, UpdateReport


def batch_metrics(batch: SequenceBatch, policy_version: int, roll_backs: Sequence[RollBack] = ()) -> dict[str, float]:
    """Numbers about the data of a step. Staleness is in steps: the mean over tokens, and that of the oldest token.

    Reward spread within groups includes their baseline samples, and leaves out samples without a trained token, as
    advantages do. All other numbers are about the samples that train."""
    trained = batch.without_baselines()
    staleness = policy_version - in_steps(trained.token_versions, roll_backs)
    _, first = np.unique(batch.group_ids, return_index=True)
    starts = np.sort(first)
    has_loss = np.logical_or.reduceat(batch.loss_mask, np.cumsum(batch.response_lengths) - batch.response_lengths)
    sizes = np.add.reduceat(has_loss.astype(np.int64), starts)
    highest = np.maximum.reduceat(np.where(has_loss, batch.rewards, -np.inf), starts)
    lowest = np.minimum.reduceat(np.where(has_loss, batch.rewards, np.inf), starts)
    return {
        "reward_mean": float(trained.rewards.mean()),
        "reward_min": float(trained.rewards.min()),
        "reward_max": float(trained.rewards.max()),
        "reward_std": _deviation(trained.rewards),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
        "num_sequences": float(trained.num_sequences),
        "prompt_tokens": float(trained.prompt_lengths.sum()),
        "response_tokens": float(len(trained.loss_mask)),
        "response_length_mean": float(trained.response_lengths.mean()),
        "mixed_version_ratio": _mixed_version_ratio(trained),
        "zero_advantage_group_ratio": float(((highest == lowest) & (sizes > 1)).mean()),
        "singleton_group_ratio": float((sizes == 1).mean()),
    }


def sample_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Shares of the samples of a step: rewards that failed, and responses that were cut at a limit."""
    samples = [sample for group in groups for sample in group.trajectories if not sample.is_baseline]
    return {
        "reward_failed_ratio": sum(sample.reward_failed for sample in samples) / len(samples),
        "truncated_ratio": sum(sample.finish_reason == "length" for sample in samples) / len(samples),
    }


def _deviation(values: NDArray[np.float32]) -> float:
    """Standard deviation of numbers whose squares may not fit into float32. NaN if one of them is not finite."""
    with np.errstate(invalid="ignore"):
        return float(values.astype(np.float64).std())


def mean_rewards(groups: Sequence[Group], rewards: NDArray[np.float32]) -> dict[str, float]:
    """Mean reward of a batch's samples by data source. `rewards` has one entry per trajectory."""
    by_source: dict[str, list[float]] = {}
    samples = ((group.data_source, trajectory) for group in groups for trajectory in group.trajectories)
    for (data_source, trajectory), reward in zip(samples, rewards.tolist(), strict=True):
        if not trajectory.is_baseline:
            by_source.setdefault(data_source, []).append(reward)
    return {data_source: sum(values) / len(values) for data_source, values in by_source.items()}


def reward_part_means(groups: Sequence[Group]) -> dict[str, float]:
    """Mean of each part of the reward over the samples that have it, as `reward_part/NAME`.

    Values that are not finite are left out. So are names beyond the first MAX_REWARD_PARTS in the order of the
    alphabet: a reward function could invent a name for every sample."""
    values: dict[str, list[float]] = {}
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        if not trajectory.is_baseline:
            for name, value in trajectory.reward_parts.items():
                if math.isfinite(value):
                    values.setdefault(_label(name), []).append(value)
    return {
        f"{REWARD_PART}{name}": math.fsum(values[name]) / len(values[name])
        for name in sorted(values)[:MAX_REWARD_PARTS]
    }


def _label(name: str) -> str:
    """A name that any logger can show: letters, digits and a few signs, at most 40 of them."""
    return re.sub(r"[^A-Za-z0-9_.@-]", "_", name)[:40] or "_"


def update_metrics(updates: Sequence[Sequence[UpdateReport]], num_tokens: int) -> dict[str, float]:
    """Numbers about the policy's updates of a step. `updates` has the reports of all ranks for each update.

    All updates together trained `num_tokens` tokens."""
    reports = [report for ranks in updates for report in ranks]
    num_tokens = max(num_tokens, 1)
    statistics = reduce(add, [report.statistics for report in reports])
    correction = reduce(CorrectionStatistics.merge, [report.correction for report in reports])
    # Only the first update counts: later ones start from weights that are no version.
    mismatch = reduce(add, [report.mismatch for report in updates[0]])
    metrics = _optimizer_metrics(updates) | {
        "kl_reference": sum(report.kl for report in reports) / num_tokens,
        "entropy": sum(report.entropy for report in reports) / num_tokens,
        "clip_ratio_low": statistics.clip_fraction_low,
        "clip_ratio_high": statistics.clip_fraction_high,
        "importance_weight_mean": correction.mean_weight,
        "importance_weight_max": float(correction.max_weight),
        "importance_ratio_max": float(correction.max_ratio),
        "is_truncated_ratio": correction.truncated_share,
        "is_rejected_ratio": correction.rejected_share,
        "effective_sample_ratio": correction.effective_sample_ratio,
        "kl_behaviour": correction.mean_kl,
        "approx_kl": statistics.approx_kl,
        "dual_clip_ratio": statistics.dual_clip_fraction,
    }
    if mismatch.mean is not None:
        metrics["logprob_mismatch"] = mismatch.mean
    return metrics | router_metrics(updates)


def router_metrics(updates: Sequence[Sequence[UpdateReport]]) -> dict[str, float]:
    """Numbers about the experts of the policy's updates. Empty for a dense model.

    The load of an expert is how often it was chosen, relative to the mean of its layer."""
    reports = [report.routers for ranks in updates for report in ranks if report.routers is not None]
    if not reports:
        return {}
    counts = np.sum([report.counts for report in reports], axis=0)
    loads = counts / np.maximum(counts.mean(axis=1, keepdims=True), 1)
    return {
        "router_aux_loss": sum(report.aux_loss for report in reports) / len(updates),
        "expert_load_max": float(loads.max()),
        "unused_expert_ratio": float((counts == 0).mean()),
        "router_replayed_ratio": sum(report.replayed_share for report in reports) / len(updates),
    }


def critic_metrics(
    updates: Sequence[Sequence[CriticReport]], batch: SequenceBatch, num_tokens: int
) -> dict[str, float]:
    """Numbers about the critic's updates of a step, and how good its values were at the start of the step.

    `updates` and `num_tokens` are as in `update_metrics`."""
    assert batch.values is not None and batch.returns is not None
    num_clipped = sum(report.num_clipped for ranks in updates for report in ranks)
    trained = batch.loss_mask.astype(bool)
    values, returns = batch.values[trained].astype(np.float64), batch.returns[trained].astype(np.float64)
    variance = float(returns.var()) if len(returns) else 0.0
    return {f"critic_{name}": value for name, value in _optimizer_metrics(updates).items()} | {
        "critic_clip_ratio": num_clipped / max(num_tokens, 1),
        "value_mean": float(values.mean()) if len(values) else 0.0,
        "value_explained_variance": 1 - float((returns - values).var()) / variance if variance else 0.0,
    }


def _optimizer_metrics(updates: Sequence[Sequence[UpdateReport | CriticReport]]) -> dict[str, float]:
    """Numbers that policy and critic share. A loss is the sum over the ranks; the rest is the same on every rank."""
    taken = [ranks[0].step for ranks in updates]
    return {
        "loss": sum(report.loss for ranks in updates for report in ranks) / len(updates),
        "grad_norm": sum(step.grad_norm for step in taken) / len(taken),
        "lr": taken[0].lr,
        "skipped": float(any(step.skipped for step in taken)),
    }


def ratio_counts(reports: Sequence[UpdateReport]) -> tuple[list[float], float]:
    """How many tokens fall into each bucket of the importance ratio, over all ranks, and the sum of the ratios."""
    counts = np.sum([report.correction.ratio_counts.cpu().numpy() for report in reports], axis=0)
    return counts.tolist(), sum(float(report.correction.sum_ratio) for report in reports)


def _mixed_version_ratio(batch: SequenceBatch) -> float:
    """Share of trajectories with tokens of more than one version, because weights changed while they were sampled."""
    starts = np.cumsum(batch.response_lengths) - batch.response_lengths
    return float((batch.unmixed_versions[starts] == -1).mean())
