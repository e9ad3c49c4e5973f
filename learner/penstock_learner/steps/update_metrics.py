"""Numbers about the updates of a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add

import numpy as np

from penstock.config.algorithms import AlgorithmConfig
from penstock_learner.algorithms.corrections import CorrectionStatistics
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.roles.dispatch import CriticReport, TrainedReport, UpdateReport
from penstock_learner.steps.roles import Update

_WITHOUT_UPDATES = (
    "loss",
    "grad_norm",
    "lr",
    "skipped",
    "kl_reference",
    "kl_behaviour",
    "clip_ratio_low",
    "clip_ratio_high",
)
"""Numbers that every step has. They are 0 if it did not update the policy."""


def metrics_of_updates(
    updates: Sequence[Update], batch: SequenceBatch, algorithm: AlgorithmConfig, kl_coefficient: float
) -> dict[str, float]:
    """Numbers about all updates of a step, which trained on `batch`."""
    metrics = dict.fromkeys(_WITHOUT_UPDATES, 0.0)
    policy = [update for update in updates if update.role == "policy"]
    if policy:
        metrics |= update_metrics([update.reports for update in policy], sum(update.num_tokens for update in policy))
    metrics["shared_tokens"] = float(sum(shard.num_shared for update in policy for shard in update.shards))
    metrics["kl_coefficient"] = kl_coefficient
    kl = algorithm.kl
    metrics["kl_loss"] = kl.loss_factor(kl_coefficient) * metrics["kl_reference"] if kl.in_loss else 0.0
    for role in dict.fromkeys(update.role for update in updates if update.role != "policy"):
        metrics |= critic_metrics(role, [update for update in updates if update.role == role], batch)
    return metrics


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


def critic_metrics(role: str, updates: Sequence[Update], batch: SequenceBatch) -> dict[str, float]:
    """Numbers about the updates of a trained role that is not the policy, with its name before theirs. For the critic
    also how good its values were at the start of the step."""
    reports = [report for update in updates for report in update.reports]
    metrics = {f"{role}_{name}": value for name, value in _optimizer_metrics([u.reports for u in updates]).items()}
    if all(isinstance(report, CriticReport) for report in reports):
        num_tokens = sum(update.num_tokens for update in updates)
        metrics[f"{role}_clip_ratio"] = sum(report.num_clipped for report in reports) / max(num_tokens, 1)
    if role != "critic" or batch.values is None or batch.returns is None:
        return metrics
    trained = batch.loss_mask.astype(bool)
    values, returns = batch.values[trained].astype(np.float64), batch.returns[trained].astype(np.float64)
    variance = float(returns.var()) if len(returns) else 0.0
    return metrics | {
        "value_mean": float(values.mean()) if len(values) else 0.0,
        "value_explained_variance": 1 - float((returns - values).var()) / variance if variance else 0.0,
    }


def _optimizer_metrics(updates: Sequence[Sequence[TrainedReport]]) -> dict[str, float]:
    """Numbers that all trained roles share. A loss is the sum over the ranks; the rest is the same on every rank."""
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
