"""The reference role: computes log-probs under the policy that the run started from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock_learner.model.causal_lm import load_model
from penstock_learner.model.packing import RankShard
from penstock_learner.model.self_check import require_right
from penstock_learner.model.sharding import shard
from penstock_learner.roles.policy_update import forward_log_probs
from penstock_learner.roles.rank import Rank


class ReferenceWorker(Rank):
    """One rank of the reference. Holds the initial weights and never changes them."""

    role = "reference"

    def load(self) -> None:
        self.model = load_model(self.config.model.path, self.model_dtype, self.config.learner.logprob_chunk_tokens).to(
            self.device
        )
        self.model.requires_grad_(False)
        if self.world_size > 1:
            shard(self.model)
        require_right(self.model, "model.path", self.device, self.model_dtype)

    def log_probs(self, part: RankShard) -> NDArray[np.float32]:
        """[T] log-probs of this rank's micro-batches, concatenated."""
        self.crash_point()
        return forward_log_probs(self.model, part, self.device)
