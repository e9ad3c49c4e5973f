"""The worker class of every role: our own, and classes that users write (`learner.roles`)."""

from __future__ import annotations

import sys

from ray import cloudpickle

from penstock.config.learner import LearnerConfig
from penstock.errors import ConfigError
from penstock.user_code import load_object
from penstock_learner.roles.critic import CriticWorker
from penstock_learner.roles.dispatch import declarations
from penstock_learner.roles.policy import PolicyWorker
from penstock_learner.roles.rank import Rank
from penstock_learner.roles.reference import ReferenceWorker
from penstock_learner.roles.reward_model import RewardModelWorker

WORKERS: dict[str, type[Rank]] = {
    worker.role: worker for worker in (PolicyWorker, ReferenceWorker, CriticWorker, RewardModelWorker)
}


def worker_of(config: LearnerConfig, name: str) -> type[Rank]:
    """The class of a role's ranks. Raises ConfigError if a user's class cannot be loaded or is no worker."""
    own = config.roles.get(name)
    if own is None:
        return WORKERS[name]
    if not own.is_own_class:
        return WORKERS[own.worker]
    key = f"learner.roles.{name}.worker"
    worker = load_object(own.worker, key)
    if not isinstance(worker, type) or not issubclass(worker, Rank):
        raise ConfigError(
            f"{key}: {own.worker} is no worker; derive the class from Rank, TrainerRank or another worker"
        )
    if not declarations(worker):
        raise ConfigError(f"{key}: {own.worker} has no method for steps; mark one with @dispatched")
    if ".py:" in own.worker:
        # Ranks get the class itself: on other machines there may be no such file.
        cloudpickle.register_pickle_by_value(sys.modules[worker.__module__])
    return worker
