"""Refuses groups with tokens that the model does not have."""

from __future__ import annotations

from penstock.errors import PoisonGroup
from penstock.trajectory import Group


def check_tokens(group: Group, vocabulary_size: int) -> None:
    """Raise PoisonGroup for a token that the model does not have. It would end the rank that looks it up."""
    for ids in (group.prompt_token_ids, *(trajectory.token_ids for trajectory in group.trajectories)):
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= vocabulary_size:
            unknown = lowest if lowest < 0 else highest
            raise PoisonGroup("shape", f"token {unknown} is not in the model's vocabulary of {vocabulary_size}")
