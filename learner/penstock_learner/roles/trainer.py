"""Code that policy and critic share: FSDP2, AdamW, and their part of a checkpoint."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import async_save

from penstock_learner.model.causal_lm import PackedCausalLM
from penstock_learner.model.precision import compute_dtype_of
from penstock_learner.model.scalar_model import PackedScalarModel
from penstock_learner.model.sharding import prepare_for_training
from penstock_learner.model.utilisation import RankUsage, measure_usage
from penstock_learner.optim.optimizer import make_optimizer
from penstock_learner.roles.rank import Rank


class TrainerRank(Rank):
    """A rank whose model is trained. Its `load` calls `prepare`."""

    def prepare(self, model: PackedCausalLM | PackedScalarModel, lr: float) -> None:
        """Shard the model over the role's ranks and give it an optimizer of its own."""
        learner = self.config.learner
        if not learner.cpu_offload:
            model.to(self.device)
        prepare_for_training(model, learner, compute_dtype_of(self.config), is_cuda=self.device.type == "cuda")
        self.optimizer = make_optimizer(model, learner, lr)
        self.trained: torch.nn.Module = model
        self.saving_group = dist.new_group(backend="gloo")
        """Process group of the thread that writes checkpoints, so its collectives do not mix with those of training."""

    def usage(self) -> RankUsage:
        """Peak memory and device of this rank."""
        return measure_usage(self.trained, self.device)

    def stage(self, folder: Path) -> None:
        """Copy this rank's shards to host memory and begin to write them. Collective. Training may then continue."""
        self.saving = async_save(self._state(), checkpoint_id=folder, process_group=self.saving_group)

    def finish_saving(self) -> None:
        """Wait until the shards are written. Called in a lane. They count once the controller renames the folder."""
        assert isinstance(self.saving, Future)
        self.saving.result()

    def restore(self, folder: Path) -> None:
        """Load shards written by any number of ranks. Collective."""
        state = self._state()
        load_shards(state, checkpoint_id=folder)
        set_state_dict(
            self.trained, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        torch.set_rng_state(state["rng"])

    def _state(self) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(self.trained, self.optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "rng": torch.get_rng_state()}
