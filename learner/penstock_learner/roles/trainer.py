"""What the roles that train share: FSDP2, AdamW, a clipped step, and their part of the checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.nn.utils import clip_grad_norm_

from penstock_learner.model import PackedCausalLM, full_weight, shard
from penstock_learner.roles.rank import Rank
from penstock_learner.scalar_model import PackedScalarModel
from penstock_learner.utilisation import RankUse, rank_use


class TrainerRank(Rank):
    """A rank whose model changes. `prepare` is called by its `load`."""

    def prepare(self, model: PackedCausalLM | PackedScalarModel, lr: float) -> None:
        """Shard the model over the role's ranks and give it an optimizer of its own."""
        learner = self.config.learner
        shard(model, reshard_after_forward=self.device.type == "cuda")
        self.lr = lr
        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=lr,
            betas=learner.betas,
            eps=learner.adam_eps,
            weight_decay=learner.weight_decay,
        )
        self.trained: torch.nn.Module = model

    def use(self) -> RankUse:
        """What this rank uses of its device."""
        return rank_use(self.trained, self.device)

    def save(self, folder: Path) -> None:
        """Write this rank's shards. Collective; complete only once the controller has renamed the folder."""
        model_state, optimizer_state = get_state_dict(self.trained, self.optimizer)
        save_shards({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)

    def restore(self, folder: Path) -> None:
        """Load shards written by any number of ranks. Collective."""
        model_state, optimizer_state = get_state_dict(self.trained, self.optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
        load_shards(state, checkpoint_id=folder)
        set_state_dict(
            self.trained, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def apply_gradients(self, step: int, *, hold: bool = False) -> tuple[float, bool]:
        """Clip, warm up and step. Returns the norm before, and whether the weights stayed for want of a finite one.

        `hold` leaves the weights and the optimizer as they are. Collective."""
        self.crash_point()
        learner = self.config.learner
        warmup = min(1.0, step / learner.warmup_steps) if learner.warmup_steps else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * warmup
        norm = clip_grad_norm_(self.trained.parameters(), learner.max_grad_norm)
        grad_norm = float(full_weight(norm))
        if not math.isfinite(grad_norm):
            return grad_norm, True
        if not hold:
            self.optimizer.step()
        return grad_norm, False

    def tensor(self, array: NDArray[np.generic] | None) -> torch.Tensor:
        assert array is not None, "the controller filled in what the algorithm needs"
        return torch.as_tensor(array, device=self.device)
