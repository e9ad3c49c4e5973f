"""The worker class of every role: our own, and classes that users write (`learner.roles`). Which roles are trained."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ray import cloudpickle

from penstock.config.learner import LearnerConfig
from penstock.errors import ConfigError
from penstock.user_code import load_object
from penstock_learner.roles.dispatch import declarations

if TYPE_CHECKING:
    from penstock_learner.roles.rank import Rank


def own_workers() -> dict[str, type[Rank]]:
    """Our own worker classes, by role. Imports the models, which takes seconds the first time."""
    from penstock_learner.roles.critic import CriticWorker
    from penstock_learner.roles.frozen import ReferenceWorker, RewardModelWorker
    from penstock_learner.roles.policy import PolicyWorker

    return {worker.role: worker for worker in (PolicyWorker, ReferenceWorker, CriticWorker, RewardModelWorker)}


def worker_of(config: LearnerConfig, name: str) -> type[Rank]:
    """The class of a role's ranks. Raises ConfigError if a user's class cannot be loaded or is not a worker."""
    from penstock_learner.roles.rank import Rank

    own = config.roles.get(name)
    if own is None:
        return own_workers()[name]
    if not own.is_own_class:
        return own_workers()[own.worker]
    key = f"learner.roles.{name}.worker"
    worker = load_object(own.worker, key)
    if not isinstance(worker, type) or not issubclass(worker, Rank):
        raise ConfigError(
            f"{key}: {own.worker} is not a worker; derive the class from Rank, TrainerRank or another worker"
        )
    if not declarations(worker):
        raise ConfigError(f"{key}: {own.worker} has no method for steps; mark one with @dispatched")
    if ".py:" in own.worker:
        # Ranks get the class itself: on other machines there may be no such file.
        cloudpickle.register_pickle_by_value(sys.modules[worker.__module__])
    return worker


def trained_roles(config: LearnerConfig) -> list[str]:
    """Names of the trained roles, the policy first. The models are imported only for a worker class of the user's."""
    return [name for name in config.needed_roles if _is_trained(config, name)]


def trains_as_policy(config: LearnerConfig, name: str) -> bool:
    """Whether the role is the policy, or has a worker class of the user's that is derived from the policy's."""
    own = config.roles.get(name)
    if own is None or not own.is_own_class:
        return name == "policy"
    from penstock_learner.roles.policy import PolicyWorker

    return issubclass(worker_of(config, name), PolicyWorker)


def _is_trained(config: LearnerConfig, name: str) -> bool:
    own = config.roles.get(name)
    if own is None:
        return name in ("policy", "critic")
    if not own.is_own_class:
        return own.worker == "critic"
    from penstock_learner.roles.trainer import TrainerRank

    return issubclass(worker_of(config, name), TrainerRank)
