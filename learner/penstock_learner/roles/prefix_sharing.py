"""Which roles compute what the sequences of a group have in common once. The controller splits batches for them."""

from __future__ import annotations

from pathlib import Path

from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock_learner.batches.partition import RankShard
from penstock_learner.batches.prefix_tree import PrefixTree
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.model.architectures import depends_on_length, path_of, require_causal
from penstock_learner.model.causal_lm import CausalLM
from penstock_learner.model.scalar_model import ScalarModel

_PADDED = frozenset({"phi"})
"""Packed types whose causal models are padded all the same, because of their heads."""


def prefix_sharing_roles(config: RunConfig) -> frozenset[str]:
    """Names of the roles with `learner.share_prefixes` whose models can do it. Reads their config.json alone."""
    learner = config.learner
    if not learner.share_prefixes:
        return frozenset()
    paths = {"policy": config.model.path, "reference": learner.reference.path or config.model.path}
    if learner.critic is not None:
        paths["critic"] = learner.critic.path or config.model.path
    return frozenset(role for role, path in paths.items() if _can_share(path))


def tree_of(micro: SequenceBatch, part: RankShard, model: CausalLM | ScalarModel) -> PrefixTree | None:
    """The tree of a micro-batch of this part, if the model computes shared tokens once. The padded path cannot."""
    if not (part.shares_prefixes and model.path.is_packed):
        return None
    return part.tree or PrefixTree.of(micro)


def _can_share(folder: Path) -> bool:
    """Whether a model's tokens are the same computation in every sequence that begins with them."""
    if not (folder / "config.json").is_file():
        return False
    try:
        config = require_causal(folder, "path")
    except ConfigError:
        return False  # its ranks refuse it, with the reason
    return path_of(config).is_packed and not depends_on_length(config) and config.model_type not in _PADDED
