"""Which roles of a run are trained. The others only compute forward passes, and are restarted when they die."""

from __future__ import annotations

from penstock.config.learner import LearnerConfig


def trained_roles(config: LearnerConfig) -> list[str]:
    """Names of the trained roles, the policy first. The models are imported only for a worker class of the user's."""
    return [name for name in config.needed_roles if _is_trained(config, name)]


def trains_as_policy(config: LearnerConfig, name: str) -> bool:
    """Whether the role is the policy, or has a worker class of the user's that is derived from the policy's."""
    own = config.roles.get(name)
    if own is None or not own.is_own_class:
        return name == "policy"
    from penstock_learner.roles.policy import PolicyWorker
    from penstock_learner.roles.workers import worker_of

    return issubclass(worker_of(config, name), PolicyWorker)


def _is_trained(config: LearnerConfig, name: str) -> bool:
    own = config.roles.get(name)
    if own is None:
        return name in ("policy", "critic")
    if not own.is_own_class:
        return own.worker == "critic"
    from penstock_learner.roles.trainer import TrainerRank
    from penstock_learner.roles.workers import worker_of

    return issubclass(worker_of(config, name), TrainerRank)
