"""The learner's numbers under verl's names, so that existing dashboards work.

docs/metrics.md has the table, and says where a number differs slightly from verl's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

VERL_NAMES = {
    "step": "training/global_step",
    "loss": "actor/pg_loss",
    "entropy": "actor/entropy",
    "grad_norm": "actor/grad_norm",
    "approx_kl": "actor/ppo_kl",
    "dual_clip_ratio": "actor/pg_clipfrac_lower",
    "kl_loss": "actor/kl_loss",
    "kl_coefficient": "actor/kl_coef",
    "lr": "actor/lr",
    "critic_loss": "critic/vf_loss",
    "critic_grad_norm": "critic/grad_norm",
    "critic_lr": "critic/lr",
    "critic_clip_ratio": "critic/vf_clipfrac",
    "value_mean": "critic/vpred_mean",
    "value_explained_variance": "critic/vf_explained_var",
    "reward_mean": "critic/rewards/mean",
    "reward_min": "critic/rewards/min",
    "reward_max": "critic/rewards/max",
    "response_length_mean": "response_length/mean",
    "kl_behaviour": "rollout_corr/k3_kl",
    "importance_weight_mean": "rollout_corr/rollout_is_mean",
    "importance_weight_max": "rollout_corr/rollout_is_max",
    "is_rejected_ratio": "rollout_corr/rollout_rs_masked_fraction",
    "effective_sample_ratio": "rollout_corr/rollout_is_eff_sample_size",
    "step_s": "timing_s/step",
    "wait_s": "timing_s/gen",
    "update_s": "timing_s/update_actor",
    "gather_s": "timing_s/update_weights",
}
VALIDATION = "val-core/"
"""Prefix of the scores of validations: `val-core/NAME/reward/mean`."""
OWN_PREFIX = "penstock/"
"""Prefix of numbers for which verl has no name."""

Metrics = Mapping[str, float]

_DERIVED: dict[str, Callable[[Metrics], float]] = {
    "actor/pg_clipfrac": lambda m: m["clip_ratio_low"] + m["clip_ratio_high"],
    "prompt_length/mean": lambda m: m["prompt_tokens"] / m["num_sequences"],
    "perf/total_num_tokens": lambda m: m["prompt_tokens"] + m["response_tokens"],
    "perf/throughput": lambda m: (m["prompt_tokens"] + m["response_tokens"]) / m["step_s"],
}
_NOT_LOGGED = ("time",)


def under_verl_names(metrics: Metrics) -> dict[str, float]:
    """Return every number once, under verl's name or `penstock/…`, and the numbers that verl derives from several.

    Names with a slash, as those of supervised fine-tuning (`train/loss`), are verl's already."""
    named = {_verl_name(name): value for name, value in metrics.items() if name not in _NOT_LOGGED}
    is_supervised = any("/" in name for name in metrics)
    return named | ({} if is_supervised else {name: derive(metrics) for name, derive in _DERIVED.items()})


def _verl_name(name: str) -> str:
    return name if "/" in name else VERL_NAMES.get(name, OWN_PREFIX + name)
