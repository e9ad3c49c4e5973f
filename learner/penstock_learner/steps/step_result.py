"""The result of a training step, and the numbers that describe it.

They go to the log, the policy record, the loggers and Prometheus, under the names of docs/metrics.md.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.config.algorithms import AlgorithmConfig, KLConfig
from penstock.errors import TrainingDiverged
from penstock.trajectory import Group
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.metrics import MAX_REWARD_PARTS, REWARD_PART
from penstock_learner.roles.dispatch import CriticReport, TrainedReport, UpdateReport
from penstock_learner.steps.roles import Update
from penstock_learner.term import Term


@dataclass(frozen=True)
class BatchNumbers:
    """Numbers about the samples of a step that train. Staleness is in steps, as the mean over tokens."""

    reward_mean: float
    staleness_mean: float
    num_sequences: int
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True)
class UpdateNumbers:
    """Numbers about the policy's updates that every step has. They are 0 if it did not update the policy."""

    loss: float = 0.0
    grad_norm: float = 0.0
    lr: float = 0.0
    skipped: float = 0.0
    kl_reference: float = 0.0
    kl_behaviour: float = 0.0
    clip_ratio_low: float = 0.0
    clip_ratio_high: float = 0.0
    shared_tokens: float = 0.0
    kl_coefficient: float = 0.0
    kl_loss: float = 0.0
    logprob_mismatch: float | None = None
    """None if no token was sampled by the learner's own version."""


@dataclass(frozen=True)
class StepResult:
    """What training on a batch has computed. The policy's ranks hold the new weights, which have no version yet."""

    step: int
    batch: BatchNumbers
    update: UpdateNumbers
    others: Mapping[str, float]
    """Numbers by name, read-only, that depend on the model, the roles, the rewards or the user's own step."""
    forward_s: float
    update_s: float
    ended_s: float
    """When the step ended, in seconds since the epoch."""
    rewards: NDArray[np.float32]
    """[S] rewards that the batch was trained with, including the reward model's."""
    recomputed: NDArray[np.float32] | None
    """[T] the policy's log-probs of the batch before its update, if they were computed."""

    def by_name(self) -> dict[str, float]:
        """All numbers under the names of docs/metrics.md. None of `others` hides a number that every step has."""
        times = {"forward_s": self.forward_s, "update_s": self.update_s, "time": self.ended_s}
        of_step = {"step": self.step, **asdict(self.batch), **asdict(self.update), **times}
        return {**self.others, **{name: float(number) for name, number in of_step.items() if number is not None}}


@dataclass(frozen=True)
class StepTimes:
    """Where the time of a step went, in seconds."""

    wait_s: float
    """There was nothing to train on."""
    compare_s: float
    """The servers' log-probs were compared with the learner's."""
    between_s: float
    """Since the step before it ended."""
    gather_s: float
    """The new weights were staged."""
    step_s: float
    """The whole step, with waiting."""
    compute_s: float
    """Forward passes, backward passes and the optimizer, on the policy's ranks."""

    @property
    def overhead_ratio(self) -> float:
        """Share of the time without waiting that was not computing: comparing servers, splitting and sending the batch,
        gathering and recording."""
        working_s = self.between_s + self.step_s - self.wait_s
        return max(0.0, 1 - self.compute_s / working_s) if working_s > 0 else 0.0

    @property
    def idle_ratio(self) -> float:
        """Share of all time that was not computing, with waiting."""
        wall_s = self.between_s + self.step_s
        return max(0.0, 1 - self.compute_s / wall_s) if wall_s > 0 else 0.0


def flattened(result: StepResult, times: StepTimes, policy_version: int, in_flight_updates: int) -> dict[str, float]:
    """All numbers of a step under the names that loggers, the policy record and Prometheus know."""
    return {
        **result.by_name(),
        **asdict(times),
        "overhead_ratio": times.overhead_ratio,
        "idle_ratio": times.idle_ratio,
        "policy_version": float(policy_version),
        "tokens_per_second": result.batch.response_tokens / times.step_s,
        "in_flight_updates": float(in_flight_updates),
    }


def batch_numbers(batch: SequenceBatch, groups: Sequence[Group], term: Term) -> tuple[BatchNumbers, dict[str, float]]:
    """The numbers of a batch of these groups, which the weights of the term train, and others by name. The spread of
    rewards within groups includes their baseline samples, and omits samples without a trained token, as advantages do.
    All other numbers are about the samples that train. Those of advantages and returns are about their trained
    tokens; there are none of returns if the estimator computes none."""
    trained = batch.without_baselines()
    ends = np.cumsum(trained.response_lengths)
    staleness = np.maximum(0, term.policy_version - term.in_steps(trained.token_versions))
    _, first = np.unique(batch.group_ids, return_index=True)
    starts = np.sort(first)
    has_loss = np.logical_or.reduceat(batch.loss_mask, np.cumsum(batch.response_lengths) - batch.response_lengths)
    sizes = np.add.reduceat(has_loss.astype(np.int64), starts)
    highest = np.maximum.reduceat(np.where(has_loss, batch.rewards, -np.inf), starts)
    lowest = np.minimum.reduceat(np.where(has_loss, batch.rewards, np.inf), starts)
    samples = [sample for group in groups for sample in group.trajectories if not sample.is_baseline]
    is_trained = trained.loss_mask.astype(bool)
    responses = ends - trained.response_lengths
    # The prompt is a turn, and so is each run of tokens of the model or of its environment.
    begins_turn = np.diff(trained.loss_mask, prepend=0) != 0
    begins_turn[responses] = True
    turns = 1 + np.add.reduceat(begins_turn, responses, dtype=np.int64)
    others = _spread("reward", trained.rewards) | _spread("num_turns", turns)
    others |= _spread("prompt_length", trained.prompt_lengths) | _spread("response_length", trained.response_lengths)
    others |= {
        "reward_std": _deviation(trained.rewards),
        "staleness_max": float(staleness.max()),
        "mixed_version_ratio": float((trained.unmixed_versions[ends - 1] == -1).mean()),
        "zero_advantage_group_ratio": float(((highest == lowest) & (sizes > 1)).mean()),
        "singleton_group_ratio": float((sizes == 1).mean()),
        "reward_failed_ratio": sum(sample.reward_failed for sample in samples) / len(samples),
        "truncated_ratio": sum(sample.finish_reason == "length" for sample in samples) / len(samples),
    }
    for name, of_tokens in (("advantage", trained.advantages), ("return", trained.returns)):
        if of_tokens is not None and is_trained.any():
            others |= _spread(name, of_tokens[is_trained].astype(np.float64))
    numbers = BatchNumbers(
        reward_mean=others["reward_mean"],
        staleness_mean=float(staleness.mean()),
        num_sequences=trained.num_sequences,
        prompt_tokens=int(trained.prompt_lengths.sum()),
        response_tokens=len(trained.loss_mask),
    )
    return numbers, others | reward_part_means(groups)


def _spread(name: str, values: NDArray[Any]) -> dict[str, float]:
    return {f"{name}_{kind}": float(getattr(values, kind)()) for kind in ("mean", "min", "max")}


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
    """Mean of each part of the reward over the samples that have it, as `reward_part/NAME`. Values that are not finite
    are skipped. So are names beyond the first MAX_REWARD_PARTS: a reward function could invent a name for every
    sample."""
    values: dict[str, list[float]] = {}
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        if not trajectory.is_baseline:
            for name, value in trajectory.reward_parts.items():
                if math.isfinite(value):
                    # Any logger can show these signs, and this length.
                    label = re.sub(r"[^A-Za-z0-9_.@-]", "_", name)[:40] or "_"
                    values.setdefault(label, []).append(value)
    return {
        f"{REWARD_PART}{name}": math.fsum(values[name]) / len(values[name])
        for name in sorted(values)[:MAX_REWARD_PARTS]
    }


_RATES = {"policy": "learner.lr", "critic": "learner.critic.lr"}
"""The learning rates of the trained roles. Other roles have theirs in `learner.roles`."""


@dataclass(eq=False)
class SkippedSteps:
    """Counts the skipped steps in a row of each role. At the limit it saves the batch for inspection and ends the run.
    With a limit of 0 the run never ends for this reason."""

    limit: int
    folder: Path
    in_a_row: Counter[str] = field(default_factory=Counter)

    def check(self, update: Update, step: int) -> None:
        """Call after every update of a trained role."""
        role, taken = update.role, update.reports[0].step
        if not taken.skipped:
            self.in_a_row[role] = 0
            return
        self.in_a_row[role] += 1
        if self.limit == 0 or self.in_a_row[role] < self.limit:
            return
        nonfinite = [
            sequence
            for shard, report in zip(update.shards, update.reports, strict=True)
            for micro in report.nonfinite
            for sequence in shard.sequences[micro]
        ]
        path = self._save(step, update.batch, nonfinite)
        prompts = sorted({int(update.batch.group_ids[sequence]) for sequence in nonfinite})
        where = f"loss of prompts {listed(prompts)}" if nonfinite else f"gradient norm ({taken.grad_norm})"
        rate = _RATES.get(role, f"learner.roles.{role}.lr")
        raise TrainingDiverged(
            f"the {role}'s {where} was not finite at step {step} ({self.in_a_row[role]} such steps in a row); look at "
            f"the batch in {path}, then continue from a checkpoint with a lower {rate} or without these prompts"
        )

    def _save(self, step: int, batch: SequenceBatch, nonfinite: list[int]) -> Path:
        """Write the whole batch as arrays, with the indices of the sequences whose loss was not finite."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{step:08d}.npz"
        arrays: dict[str, Any] = batch.arrays | {"nonfinite_sequences": np.array(nonfinite, dtype=np.int64)}
        np.savez_compressed(path, **arrays)
        return path


def listed(prompts: list[int], at_most: int = 8) -> str:
    more = ", …" if len(prompts) > at_most else ""
    return ", ".join(map(str, prompts[:at_most])) + more


def numbers_of_updates(
    updates: Sequence[Update], batch: SequenceBatch, algorithm: AlgorithmConfig, kl_coefficient: float
) -> tuple[UpdateNumbers, dict[str, float]]:
    """The numbers about updates that every step has, and those that depend on the model and the roles."""
    policy = [update for update in updates if update.role == "policy"]
    numbers = UpdateNumbers(kl_coefficient=kl_coefficient)
    others: dict[str, float] = {}
    if policy:
        numbers, others = policy_numbers(policy, algorithm.kl, kl_coefficient)
    for role in dict.fromkeys(update.role for update in updates if update.role != "policy"):
        others |= critic_metrics(role, [update for update in updates if update.role == role], batch)
    return numbers, others


def policy_numbers(
    policy: Sequence[Update], kl: KLConfig, kl_coefficient: float
) -> tuple[UpdateNumbers, dict[str, float]]:
    """The numbers of a step's updates of the policy, over all their tokens and ranks."""
    updates: list[Sequence[UpdateReport]] = [update.reports for update in policy]
    reports = [report for ranks in updates for report in ranks]
    num_tokens = max(sum(update.num_tokens for update in policy), 1)
    statistics = reduce(add, [report.statistics for report in reports])
    correction = reduce(add, [report.correction for report in reports])
    # Only the first update counts: later ones start from weights that are not a version.
    mismatch = reduce(add, [report.mismatch for report in updates[0]])
    kl_reference = sum(report.kl for report in reports) / num_tokens
    numbers = UpdateNumbers(
        **_optimizer_metrics(updates),
        kl_reference=kl_reference,
        kl_behaviour=correction.mean_of(correction.sum_kl),
        clip_ratio_low=statistics.mean_of(statistics.num_clipped_low),
        clip_ratio_high=statistics.mean_of(statistics.num_clipped_high),
        shared_tokens=sum(shard.num_shared for update in policy for shard in update.shards),
        kl_coefficient=kl_coefficient,
        kl_loss=kl.loss_factor(kl_coefficient) * kl_reference if kl.in_loss else 0.0,
        logprob_mismatch=mismatch.mean,
    )
    return numbers, {
        "entropy": sum(report.entropy for report in reports) / num_tokens,
        "importance_weight_mean": correction.mean_of(correction.sum_weights),
        "importance_weight_max": float(correction.max_weight),
        "importance_ratio_max": float(correction.max_ratio),
        "is_truncated_ratio": correction.mean_of(correction.num_truncated),
        "is_rejected_ratio": correction.mean_of(correction.num_rejected),
        "effective_sample_ratio": correction.effective_sample_ratio,
        "approx_kl": statistics.mean_of(statistics.sum_negative_log_ratio),
        "dual_clip_ratio": statistics.mean_of(statistics.num_dual_clipped),
        **router_metrics(updates),
    }


def router_metrics(updates: Sequence[Sequence[UpdateReport]]) -> dict[str, float]:
    """Numbers about the experts of the policy's updates. Empty for a dense model. The load of an expert is how often it
    was chosen, relative to the mean of its layer."""
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
    spread = _spread("value", values) if len(values) else {}
    return (
        metrics
        | spread
        | {
            "value_explained_variance": 1 - float((returns - values).var()) / variance if variance else 0.0,
        }
    )


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
