"""The reference role: log-probs under the policy that the run started from."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from penstock_learner.model import ModelInputs, PackedCausalLM, load_model, shard
from penstock_learner.packing import RankShard
from penstock_learner.roles.rank import Rank


class ReferenceWorker(Rank):
    """Holds the initial weights and never changes them."""

    role = "reference"

    def load(self) -> None:
        self.model = load_model(self.config.model.path, self.model_dtype, self.config.learner.logprob_chunk_tokens).to(
            self.device
        )
        self.model.requires_grad_(False)
        if self.world_size > 1:
            shard(self.model)

    def log_probs(self, part: RankShard) -> NDArray[np.float32]:
        """[T] of this rank's micro-batches, concatenated."""
        self.crash_point()
        return forward_log_probs(self.model, part, self.device)


def forward_log_probs(model: PackedCausalLM, part: RankShard, device: torch.device) -> NDArray[np.float32]:
    """A forward pass without gradient over every micro-batch."""
    with torch.no_grad():
        results = [model(ModelInputs.of(micro, device))[0].float().cpu().numpy() for micro in part.micro_batches]
    joined: NDArray[np.float32] = np.concatenate(results)
    return joined
