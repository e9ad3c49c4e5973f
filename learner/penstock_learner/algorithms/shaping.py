"""Changes to rewards before advantages: their placement on a token, and DAPO's length penalty."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.config.algorithms import OverlongConfig


def place_on_last_token(sequence_rewards: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """From [S] to [T]: each sequence's reward at its last trained token, 0 elsewhere.

    The reward of a sequence without a trained token is dropped. Advantages leave such a sequence out of its group.
    """
    trained = mask.bool().nonzero().squeeze(1)
    ids = sequence_ids[trained]
    is_last = torch.ones_like(ids, dtype=torch.bool)
    is_last[:-1] = ids[1:] != ids[:-1]
    token_rewards = sequence_rewards.new_zeros(sequence_ids.shape[0])
    token_rewards[trained[is_last]] = sequence_rewards[ids[is_last]]
    return token_rewards


def overlong_penalty(num_response_tokens: Tensor, config: OverlongConfig) -> Tensor:
    """[S] `min(-(len - (max - buffer)) / buffer * factor, 0)`. Add it to the sequence's reward."""
    start = config.max_num_tokens - config.buffer_num_tokens
    excess = (num_response_tokens - start).to(torch.get_default_dtype()) / config.buffer_num_tokens
    return (-excess * config.factor).clamp(max=0)
