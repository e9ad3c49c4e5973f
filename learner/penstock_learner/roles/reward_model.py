"""The reward model role: a number for each trajectory, from a sequence classifier over exactly its tokens."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from penstock_learner.model import ModelInputs, shard
from penstock_learner.packing import RankShard
from penstock_learner.roles.rank import Rank
from penstock_learner.scalar_model import check_tokenizer, load_scalar_model

KEY = "learner.reward_model.path"


class RewardModelWorker(Rank):
    """Holds the classifier and never changes it."""

    role = "reward_model"

    def load(self) -> None:
        config = self.config.learner.reward_model
        assert config is not None
        check_tokenizer(config.path, self.config.model.path, KEY)
        self.model = load_scalar_model(config.path, self.model_dtype, key=KEY, make_head=False).to(self.device)
        self.model.requires_grad_(False)
        if self.world_size > 1:
            shard(self.model)

    def scores(self, part: RankShard) -> NDArray[np.float32]:
        """One for each sequence of this rank's micro-batches, in order: the head's number at its last token."""
        self.crash_point()
        results = []
        with torch.no_grad():
            for micro in part.micro_batches:
                last = torch.as_tensor(np.cumsum(micro.lengths) - 1, device=self.device)
                results.append(self.model(ModelInputs.of(micro, self.device), last).cpu().numpy())
        joined: NDArray[np.float32] = np.concatenate(results)
        return joined
