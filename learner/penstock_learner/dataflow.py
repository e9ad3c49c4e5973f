"""The names with which you write your own steps. docs/own-dataflow.md has a worked example.

The base classes of workers are in `penstock_learner.roles`: `rank.Rank`, `trainer.TrainerRank`, and those of the
built-in roles. They import the models, so a file with steps alone should not import them.
"""

from penstock_learner.batches.partition import RankShard
from penstock_learner.batches.sequence_batch import SequenceBatch, concat
from penstock_learner.roles.dispatch import dispatched
from penstock_learner.roles.role_group import gather_all
from penstock_learner.steps.program import denominators_of, update_critic, update_policy, with_advantages
from penstock_learner.steps.program import own_ahead as ahead
from penstock_learner.steps.roles import BatchContext, Role, Roles, StepContext, Update, gather_fields

__all__ = [
    "BatchContext",
    "RankShard",
    "Role",
    "Roles",
    "SequenceBatch",
    "StepContext",
    "Update",
    "ahead",
    "concat",
    "denominators_of",
    "dispatched",
    "gather_all",
    "gather_fields",
    "update_critic",
    "update_policy",
    "with_advantages",
]
