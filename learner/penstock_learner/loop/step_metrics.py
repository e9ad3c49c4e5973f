"""Numbers about the data of a step. They go to the log, the policy record, the loggers and Prometheus."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.trajectory import Group
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.loop.roll_back import RollBack, in_steps
from penstock_learner.metrics import MAX_REWARD_PARTS, REWARD_PART


def batch_metrics(batch: SequenceBatch, policy_version: int, roll_backs: Sequence[RollBack] = ()) -> dict[str, float]:
    """Numbers about the data of a step. Staleness is in steps: the mean over tokens, and that of the oldest token.

    Reward spread within groups includes their baseline samples, and leaves out samples without a trained token, as
    advantages do. All other numbers are about the samples that train."""
    trained = batch.without_baselines()
    staleness = np.maximum(0, policy_version - in_steps(trained.token_versions, roll_backs))
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


def overhead_metrics(times: Mapping[str, float], compute_s: float) -> dict[str, float]:
    """What the learner did besides its work in a step, and the time since the step before it.

    `compute_s` is the time of forward passes, backward passes and the optimizer on the policy's ranks. Overhead is all
    other time but that in which there was nothing to train on (`wait_s`): comparing servers, splitting and sending the
    batch, gathering and recording. It is a share of the time without waiting. `idle_ratio` counts waiting too, as a
    share of all time."""
    wall_s = times["between_s"] + times["step_s"]
    working_s = wall_s - times["wait_s"]
    return {
        "compute_s": compute_s,
        "overhead_ratio": max(0.0, 1 - compute_s / working_s) if working_s > 0 else 0.0,
        "idle_ratio": max(0.0, 1 - compute_s / wall_s) if wall_s > 0 else 0.0,
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


def _mixed_version_ratio(batch: SequenceBatch) -> float:
    """Share of trajectories with tokens of more than one version, because weights changed while they were sampled."""
    starts = np.cumsum(batch.response_lengths) - batch.response_lengths
    return float((batch.unmixed_versions[starts] == -1).mean())
