"""Translates the algorithm: advantage, loss, KL penalty and off-policy correction."""

from __future__ import annotations

from typing import Any

from penstock.config.algorithms import ADVANTAGE_NAMES, LOSS_NAMES
from penstock_tools.verl_import.keys import Values

_ACTOR = "actor_rollout_ref.actor."
_CORRECTION = "algorithm.rollout_correction."
_OURS = "learner.algorithm."
_ADVANTAGES = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
_LOSSES = {"vanilla": "ppo"} | {name: name for name in LOSS_NAMES if name not in ("ppo", "reinforce")}
_OF_SEQUENCES = ("geo_mean", "sapo")
"""Losses that verl averages within each sequence first, whatever its config says."""
_PENALTIES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_OWN = "write it as your own, in a file: docs/algorithms.md#your-own-advantage-or-loss"


def has_critic(values: Values) -> bool:
    enabled = values.given.get("critic.enable")
    return values.get("algorithm.adv_estimator") == "gae" and enabled is not False


def set_algorithm(values: Values, max_staleness: int, max_response: int) -> None:
    _set_advantage(values)
    _set_loss(values, max_response)
    _set_kl(values)
    _set_correction(values, max_staleness)
    _set_routers(values)


def _set_advantage(values: Values) -> None:
    key = "algorithm.adv_estimator"
    name = str(values.get(key))
    ours = _ADVANTAGES.get(name, name)
    if name == "gae" and not has_critic(values):
        ours = "reinforce_plus_plus"
        values.lose(key, "gae without a critic is replaced by reinforce_plus_plus")
    elif ours not in ADVANTAGE_NAMES:
        ours = "grpo"
        values.lose(key, f"replaced by grpo; {_OWN}")
    values.set(_OURS + "advantage.name", ours)
    for prefix in ("algorithm.gamma", "algorithm.lam", "algorithm.norm_adv"):
        values.set_direct(prefixes=(prefix,))
    if ours == "gdpo":
        for part in ("reward_keys", "reward_weights"):
            if values.is_given(f"algorithm.gdpo_{part}"):
                values.set(f"{_OURS}advantage.{part}", values.get(f"algorithm.gdpo_{part}"))
    else:
        values.ignore("algorithm.gdpo_")
    if ours == "remax":
        values.findings.notes.append(
            "remax: each prompt gets one more sample, the greedy baseline, which is not trained on"
        )


def _set_loss(values: Values, max_response: int) -> None:
    key = _ACTOR + "policy_loss.loss_mode"
    mode = str(values.get(key)).replace("-", "_")
    is_reinforce = values.get(_CORRECTION + "bypass_mode") and (
        values.get(_CORRECTION + "loss_type") == "reinforce" or values.get(_CORRECTION + "use_policy_gradient")
    )
    name = "reinforce" if is_reinforce else _LOSSES.get(mode, "ppo")
    if mode not in _LOSSES:
        values.lose(key, f"replaced by ppo; {_OWN}")
    values.set(_OURS + "loss.name", name)
    values.set_direct(prefixes=(_ACTOR + "policy_loss.", _ACTOR + "tau_"))
    if name == "dro" and values.is_given(_ACTOR + "policy_loss.dro_beta"):
        values.set(_OURS + "loss.dro_beta", values.get(_ACTOR + "policy_loss.dro_beta"))
    if name in ("clip_cov", "kl_cov"):
        values.set(_OURS + "loss.cov_share", values.get(_ACTOR + f"policy_loss.{name}_ratio"))
    for ours, side in (("clip_low", "clip_ratio_low"), ("clip_high", "clip_ratio_high")):
        both = values.given.get(_ACTOR + "clip_ratio")
        value = values.given.get(_ACTOR + side)
        chosen = value if value is not None else both if both is not None else 0.2
        values.set(_OURS + f"loss.{ours}", chosen)
    values.set_direct(prefixes=(_ACTOR + "clip_ratio_c", _ACTOR + "entropy_coeff"))
    aggregation = values.get(_ACTOR + "loss_agg_mode")
    values.set(_OURS + "loss.aggregation", "seq-mean-token-mean" if name in _OF_SEQUENCES else aggregation)
    if name == "gspo" and aggregation != "seq-mean-token-mean":
        values.findings.notes.append(
            f"gspo is averaged by {aggregation}, as in verl 0.9; older versions always took seq-mean-token-mean"
        )
    if aggregation == "seq-mean-token-sum-norm" and name not in _OF_SEQUENCES:
        values.set(_OURS + "loss.constant_length", values.get(_ACTOR + "loss_scale_factor") or max_response)
    if has_critic(values):
        for shared in ("ppo_mini_batch_size", "ppo_epochs", "grad_clip"):
            if values.get(f"critic.{shared}") == values.get(_ACTOR + shared):
                values.ignore(f"critic.{shared}")
        values.set_direct(prefixes=("critic.cliprange_value",))
        critic_aggregation = values.get("critic.loss_agg_mode") or aggregation
        values.set(_OURS + "value_loss.aggregation", critic_aggregation)
        if critic_aggregation == "seq-mean-token-sum-norm":
            values.set(_OURS + "value_loss.constant_length", max_response)


def _set_kl(values: Values) -> None:
    in_reward, in_loss = values.get("algorithm.use_kl_in_reward"), values.get(_ACTOR + "use_kl_loss")
    if values.get("algorithm.adv_estimator") == "gdpo":
        in_reward = False
        values.lose("algorithm.use_kl_in_reward", "gdpo uses the parts of the reward alone, here and in verl")
    kl = _OURS + "kl."
    placement = "both" if in_reward and in_loss else "reward" if in_reward else "loss" if in_loss else "none"
    values.set(kl + "placement", placement)
    if placement == "none":
        return
    loss_penalty, loss_coefficient = _penalty(values, _ACTOR + "kl_loss_type"), values.get(_ACTOR + "kl_loss_coef")
    if in_reward:
        values.set(kl + "penalty", _penalty(values, "algorithm.kl_penalty"))
        values.set(kl + "coefficient", values.get("algorithm.kl_ctrl.kl_coef"))
        values.set_direct(prefixes=("algorithm.kl_ctrl.",))
    if placement == "both":
        values.set(kl + "loss_penalty", loss_penalty)
        values.set(kl + "loss_coefficient", loss_coefficient)
    elif in_loss:
        values.set(kl + "penalty", loss_penalty)
        values.set(kl + "coefficient", loss_coefficient)


def _penalty(values: Values, key: str) -> str:
    name = str(values.get(key))
    ours = _PENALTIES.get(name.removesuffix("+"))
    if ours is None:
        values.lose(key, "replaced by k3, the low-variance estimator")
    elif name.endswith("+"):
        values.lose(key, f"replaced by {ours}: the gradient is that of the estimator itself, not of k2")
    return ours or "k3"


def _set_correction(values: Values, max_staleness: int) -> None:
    ours = _OURS + "correction."
    weight = _level(values.get(_CORRECTION + "rollout_is"))
    is_bypass = bool(values.get(_CORRECTION + "bypass_mode"))
    is_reinforce = values.fields["learner"]["algorithm"]["loss"]["name"] == "reinforce"
    if is_bypass or is_reinforce:
        values.set(ours + "mode", "bypass")
        if weight:
            values.lose(
                _CORRECTION + "rollout_is",
                "with bypass_mode the ratio of the loss is already that to the engine's policy",
            )
        if is_reinforce:
            values.set(_OURS + "loss.ratio_cap", values.get(_CORRECTION + "rollout_is_threshold"))
    elif weight or max_staleness > 0:
        values.set(ours + "mode", "decoupled")
        values.set(ours + "weight", "sequence_truncation" if weight == "sequence" else "token_truncation")
        values.set(ours + "cap", values.get(_CORRECTION + "rollout_is_threshold"))
    else:
        values.set(ours + "mode", "none")
    _set_rejection(values, ours)


def _set_rejection(values: Values, ours: str) -> None:
    key = _CORRECTION + "rollout_rs"
    options = [option.strip() for option in str(values.get(key) or "").split(",") if option.strip() not in ("", "null")]
    if not options:
        return
    names = {"token": "token", "token_k1": "token", "sequence": "sequence", "seq_sum_k1": "sequence"}
    kept = next((option for option in options if option in names), None)
    if kept is None or len(options) > 1:
        lost = ", ".join(option for option in options if option != kept)
        values.lose(key, f"{lost}: samples are rejected by the ratio of a token or the product of a sequence only")
    if kept is None:
        return
    bounds = str(values.get(_CORRECTION + "rollout_rs_threshold") or 2.0).split(",")
    low, has_low, high = bounds[min(options.index(kept), len(bounds) - 1)].partition("_")
    upper = float(high if has_low else low)
    lower = values.get(_CORRECTION + "rollout_rs_threshold_lower") or (float(low) if has_low else 1 / upper)
    values.set(ours + "rejection", names[kept])
    values.set(ours + "rejection_low", lower)
    values.set(ours + "rejection_high", upper)


def _level(value: Any) -> str:
    return value if value in ("token", "sequence") else ""


def _set_routers(values: Values) -> None:
    mode = str(values.get(_ACTOR + "router_replay.mode"))
    if values.get("actor_rollout_ref.rollout.enable_rollout_routing_replay") or mode == "R3":
        values.set("learner.router.replay", True)
    elif mode not in ("disabled", "None"):
        values.lose(_ACTOR + "router_replay.mode", "the learner replays the engine's experts (R3) or none")
    key = _ACTOR + "megatron.override_transformer_config.moe_aux_loss_coeff"
    if values.is_given(key):
        values.set("learner.router.aux_loss_coefficient", values.get(key))
