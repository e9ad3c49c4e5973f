"""Your own advantage and loss. demo.yaml names them by this file's path.

Tensors have no padding: the response tokens of all sequences are concatenated to T entries. `inputs.sequence_ids[T]` is
the sequence of each token, `inputs.group_ids[S]` the prompt of each sequence, and `inputs.mask[T]` is nonzero at the
tokens that are trained.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.config.algorithms import AdvantageConfig, LossConfig
from penstock_learner.algorithms.advantages import AdvantageInputs
from penstock_learner.algorithms.losses import LossInputs


def median_baseline(inputs: AdvantageInputs, config: AdvantageConfig) -> Tensor:
    """The reward of a sequence minus the median of its group. Returns [T], one advantage per token."""
    rewards = torch.zeros(inputs.num_sequences).index_add(0, inputs.sequence_ids, inputs.token_rewards * inputs.mask)
    advantages = torch.zeros_like(rewards)
    for group_id in inputs.group_ids.unique():
        members = inputs.group_ids == group_id
        advantages[members] = rewards[members] - rewards[members].median()
    return advantages[inputs.sequence_ids]


def soft_clip(inputs: LossInputs, config: LossConfig) -> Tensor:
    """`-A tanh(ratio - 1)`, which flattens where PPO clips. Returns [T], one loss per token.

    The gradient must flow through `inputs.log_probs`. Values at masked-out tokens do not matter."""
    ratio = (inputs.log_probs - inputs.old_log_probs).clamp(-20, 20).exp()
    return -inputs.advantages * torch.tanh((ratio - 1) / config.epsilon_high) * config.epsilon_high
