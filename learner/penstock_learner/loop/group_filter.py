"""Which groups are worth training on, by their rewards and lengths."""

from __future__ import annotations

from penstock.config.service import ReplayConfig
from penstock.trajectory import Group

NO_SPREAD, PASS_RATE, TOO_LONG = "no_spread", "pass_rate", "too_long"


def reason_to_discard(group: Group, config: ReplayConfig) -> str:
    """Why the group is not trained, as one word for the metric; empty if it is. Only samples with a trained token
    count, and not the greedy baseline."""
    limits = config.group_filter
    samples = [sample for sample in group.trajectories if sample.has_trained_token]
    rewards = [sample.reward for sample in samples]
    # A group with one sample counts as having spread: the sample is not compared with itself. A session is one sample,
    # however many paths it has.
    spread = max(rewards, default=0.0) - min(rewards, default=0.0)
    num_samples = len({sample.episode or -number for number, sample in enumerate(samples, 1)})
    if num_samples != 1 and (config.dynamic_sampling and spread == 0 or spread < limits.min_spread):
        return NO_SPREAD
    drawn = [sample.reward for sample in samples if not sample.is_baseline]
    rate = sum(reward >= limits.pass_reward for reward in drawn) / len(drawn) if drawn else 0.0
    if not limits.min_pass_rate <= rate <= limits.max_pass_rate:
        return PASS_RATE
    longest = max((len(sample.token_ids) for sample in group.trajectories), default=0)
    return TOO_LONG if limits.max_response_tokens is not None and longest > limits.max_response_tokens else ""
