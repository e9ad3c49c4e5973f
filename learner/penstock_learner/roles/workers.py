"""The worker class of every role."""

from __future__ import annotations

from penstock_learner.roles.critic import CriticWorker
from penstock_learner.roles.policy import PolicyWorker
from penstock_learner.roles.rank import Rank
from penstock_learner.roles.reference import ReferenceWorker
from penstock_learner.roles.reward_model import RewardModelWorker

WORKERS: dict[str, type[Rank]] = {
    worker.role: worker for worker in (PolicyWorker, ReferenceWorker, CriticWorker, RewardModelWorker)
}
