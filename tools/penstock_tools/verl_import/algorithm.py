"""Translates the algorithm: advantage, loss, KL penalty and off-policy correction."""

from __future__ import annotations

from penstock.config.algorithms import ADVANTAGE_NAMES
from penstock_tools.verl_import.convert import CONVERTERS, OWN, kl_penalty
from penstock_tools.verl_import.keys import Values

_ACTOR = "actor_rollout_ref.actor."
_CORRECTION = "algorithm.rollout_correction."
_OURS = "learner.algorithm."
_ADVANTAGES = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
_OF_SEQUENCES = ("geo_mean", "sapo")
"""Losses that verl averages within each sequence first, whatever its config says."""


def has_critic(values: Values) -> bool:
    return values.get("algorithm.adv_estimator") == "gae" and values.given.get("critic.enable") is not False


def has_kl_reward(values: Values) -> bool:
    return bool(values.get("algorithm.use_kl_in_reward")) and values.get("algorithm.adv_estimator") != "gdpo"


def loss_name(values: Values) -> str:
    is_policy_gradient = values.get(_CORRECTION + "use_policy_gradient")
    if values.get(_CORRECTION + "bypass_mode") and (
        values.get(_CORRECTION + "loss_type") == "reinforce" or is_policy_gradient
    ):
        return "reinforce"
    return str(values.converted(_ACTOR + "policy_loss.loss_mode", CONVERTERS["loss"]))


def set_algorithm(values: Values, max_staleness: int, max_response: int) -> None:
    _set_advantage(values)
    _set_loss(values, max_response)
    _set_kl(values)
    _set_correction(values, max_staleness)
    _set_rejection(values)
    mode = str(values.get(_ACTOR + "router_replay.mode"))
    if values.get("actor_rollout_ref.rollout.enable_rollout_routing_replay") or mode == "R3":
        values.set("learner.router.replay", True)
    elif mode not in ("disabled", "None"):
        values.lose(_ACTOR + "router_replay.mode", "the learner replays the engine's experts (R3) or none")


def _set_advantage(values: Values) -> None:
    key = "algorithm.adv_estimator"
    name = str(values.get(key))
    ours = _ADVANTAGES.get(name, name)
    if name == "gae" and not has_critic(values):
        ours = "reinforce_plus_plus"
        values.lose(key, "gae without a critic is replaced by reinforce_plus_plus")
    elif ours not in ADVANTAGE_NAMES:
        ours = "grpo"
        values.lose(key, f"replaced by grpo; {OWN}")
    values.set(_OURS + "advantage.name", ours)
    if ours != "gdpo":
        values.ignore("algorithm.gdpo_")
    if ours == "remax":
        values.findings.notes.append(
            "remax: each prompt gets one more sample, the greedy baseline, which is not trained on"
        )


def _set_loss(values: Values, max_response: int) -> None:
    name, aggregation = loss_name(values), values.get(_ACTOR + "loss_agg_mode")
    values.set(_OURS + "loss.name", name)
    if name in ("clip_cov", "kl_cov"):
        values.set(_OURS + "loss.cov_share", values.get(_ACTOR + f"policy_loss.{name}_ratio"))
    for side in ("low", "high"):
        given = [values.given.get(_ACTOR + key) for key in (f"clip_ratio_{side}", "clip_ratio")]
        values.set(_OURS + f"loss.clip_{side}", next((value for value in given if value is not None), 0.2))
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
        critic_aggregation = values.get("critic.loss_agg_mode") or aggregation
        values.set(_OURS + "value_loss.aggregation", critic_aggregation)
        if critic_aggregation == "seq-mean-token-sum-norm":
            values.set(_OURS + "value_loss.constant_length", max_response)


def _set_kl(values: Values) -> None:
    in_reward, in_loss = has_kl_reward(values), bool(values.get(_ACTOR + "use_kl_loss"))
    if values.get("algorithm.adv_estimator") == "gdpo":
        values.lose("algorithm.use_kl_in_reward", "gdpo uses the parts of the reward alone, here and in verl")
    placement = {(True, True): "both", (True, False): "reward", (False, True): "loss"}.get((in_reward, in_loss), "none")
    values.set(_OURS + "kl.placement", placement)
    if in_reward:
        values.set(_OURS + "kl.penalty", values.converted("algorithm.kl_penalty", kl_penalty))
        values.set(_OURS + "kl.coefficient", values.get("algorithm.kl_ctrl.kl_coef"))
    if in_loss:
        prefix = "loss_" if in_reward else ""
        values.set(_OURS + f"kl.{prefix}penalty", values.converted(_ACTOR + "kl_loss_type", kl_penalty))
        values.set(_OURS + f"kl.{prefix}coefficient", values.get(_ACTOR + "kl_loss_coef"))


def _set_correction(values: Values, max_staleness: int) -> None:
    ours, key, cap = _OURS + "correction.", _CORRECTION + "rollout_is", values.get(_CORRECTION + "rollout_is_threshold")
    weight = values.get(key) if values.get(key) in ("token", "sequence") else ""
    is_reinforce = values.ours(_OURS + "loss.name") == "reinforce"
    if values.get(_CORRECTION + "bypass_mode") or is_reinforce:
        values.set(ours + "mode", "bypass")
        if weight:
            values.lose(key, "with bypass_mode the ratio of the loss is already that to the engine's policy")
        if is_reinforce:
            values.set(_OURS + "loss.ratio_cap", cap)
    elif weight or max_staleness > 0:
        values.set(ours + "mode", "decoupled")
        values.set(ours + "weight", "sequence_truncation" if weight == "sequence" else "token_truncation")
        values.set(ours + "cap", cap)
    else:
        values.set(ours + "mode", "none")


def _set_rejection(values: Values) -> None:
    ours, key = _OURS + "correction.", _CORRECTION + "rollout_rs"
    options = [option.strip() for option in str(values.get(key) or "").split(",") if option.strip() not in ("", "null")]
    names = {"token": "token", "token_k1": "token", "sequence": "sequence", "seq_sum_k1": "sequence"}
    kept = next((option for option in options if option in names), None)
    if lost := ", ".join(option for option in options if option != kept):
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
