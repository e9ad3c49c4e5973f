"""The critic role: learns the values of states, with FSDP2 and its own optimizer."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from penstock_learner.algorithms.aggregation import Denominators, aggregate
from penstock_learner.algorithms.losses import value_loss
from penstock_learner.batches.partition import RankShard
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.model.adapter import add_critic_adapter
from penstock_learner.model.attention.packed_layout import ModelInputs, required_to_device, to_device, tree_of
from penstock_learner.model.scalar_model import check_tokenizer, open_scalar_model
from penstock_learner.model.self_check import require_right
from penstock_learner.model.torch_settings import DTYPES, compute_dtype_of
from penstock_learner.optim.optimizer import apply_gradients
from penstock_learner.roles.dispatch import CriticReport, dispatched
from penstock_learner.roles.trainer import TrainerRank


class CriticWorker(TrainerRank):
    """One rank of the critic. The value of a response token is that of the state before it: the head's output at the
    previous token."""

    role = "critic"

    def load(self) -> None:
        path = self.settings.path or self.config.model.path
        check_tokenizer(path, self.config.model.path, self.path_key)
        dtype = DTYPES[self.config.learner.master_dtype]
        self.model = open_scalar_model(path, dtype, key=self.path_key, make_head=True)
        if lora := getattr(self.settings, "lora", None):
            add_critic_adapter(self.model, lora, self.path_key.replace(".path", ".lora"))
        self.lr = self.settings.lr
        self.prepare(self.model, self.lr)
        require_right(self.model, self.path_key, self.device, compute_dtype_of(self.config), self.parallel)

    @dispatched(join="tokens")
    def values(self, part: RankShard) -> NDArray[np.float32]:
        """[T] values of this rank's micro-batches under the current weights, concatenated."""
        with torch.no_grad():
            results = [self._forward(micro, part).cpu().numpy() for micro in part.micro_batches]
        joined: NDArray[np.float32] = np.concatenate(results)
        return joined

    @dispatched(join="reports")
    def update(self, part: RankShard, denominators: Denominators, step: int) -> CriticReport:
        """Take one optimizer step, of which this rank computes its part. Collective."""
        self.crash_point()
        self.optimizer.zero_grad(set_to_none=True)
        on_device = torch.stack([self._accumulate(micro, part, denominators) for micro in part.micro_batches])
        taken = apply_gradients(self.model, self.optimizer, self.learner, step - 1, lr=self.lr, losses=on_device[:, 0])
        sums = on_device.tolist()
        nonfinite = tuple(index for index, (loss, _) in enumerate(sums) if not math.isfinite(loss))
        loss, num_clipped = (sum(column) for column in zip(*sums, strict=True))
        return CriticReport(loss, taken, nonfinite, int(num_clipped))

    def run_passes(self, part: RankShard, denominators: Denominators) -> None:
        self.values(part)
        for micro in part.micro_batches:
            self._accumulate(micro, part, denominators)

    def _accumulate(self, micro: SequenceBatch, part: RankShard, denominators: Denominators) -> torch.Tensor:
        """Run the forward and backward pass of one micro-batch. Gradients add up to those of the whole batch. Returns
        loss and number of clipped tokens as a [2] tensor. Nothing is read back, so the host prepares the next
        micro-batch meanwhile."""
        config = self.config.learner.algorithm.value_loss
        mask, sequence_ids = to_device(micro.loss_mask, self.device).bool(), to_device(micro.sequence_ids, self.device)
        old, returns = required_to_device(micro.values, self.device), required_to_device(micro.returns, self.device)
        per_token, num_clipped = value_loss(self._forward(micro, part), old, returns, mask, config)
        loss = aggregate(per_token, mask, sequence_ids, config.aggregation, denominators)
        # FSDP averages gradients over ranks. The denominators are global, so the sum is needed.
        (loss * self.world_size).backward()
        return torch.stack([loss.detach(), num_clipped.to(loss.dtype)])

    def _forward(self, micro: SequenceBatch, part: RankShard) -> torch.Tensor:
        inputs = ModelInputs.of(micro, self.device, self.parallel, tree=tree_of(micro, part, self.model))
        values: torch.Tensor = self.model(inputs, inputs.predicting)
        return values
