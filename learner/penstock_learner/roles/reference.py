"""The reference role: computes log-probs under the policy that the run started from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock_learner.batches.partition import RankShard
from penstock_learner.model.causal_lm import open_model
from penstock_learner.model.loading import read_weights
from penstock_learner.model.scalar_model import check_tokenizer
from penstock_learner.model.self_check import require_right
from penstock_learner.model.sharding import shard
from penstock_learner.roles.dispatch import dispatched
from penstock_learner.roles.policy_update import forward_log_probs
from penstock_learner.roles.rank import Rank


class ReferenceWorker(Rank):
    """One rank of the reference. Holds the initial weights, or those of the role's own path, and never changes them."""

    role = "reference"

    def load(self) -> None:
        path, key = self.config.model.path, "model.path"
        if self.settings.path is not None:
            path, key = self.settings.path, self.path_key
            check_tokenizer(path, self.config.model.path, key)
        self.model = open_model(path, self.model_dtype, self.config.learner.logprob_chunk_tokens, key=key)
        self.model.requires_grad_(False)
        if self.world_size > 1:
            shard(self.model)
        read_weights(self.model, self.device)
        require_right(self.model, key, self.device, self.model_dtype)

    @dispatched(join="tokens")
    def log_probs(self, part: RankShard) -> NDArray[np.float32]:
        """[T] log-probs of this rank's micro-batches, concatenated."""
        self.crash_point()
        return forward_log_probs(self.model, part, self.device)
