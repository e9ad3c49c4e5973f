"""One process of a supervised fine-tuning: its part of the model, an optimizer step, and the loss of held-out rows.

It is a rank of the learner's policy without Ray: torchrun, or the command itself, starts the processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported, but not listed

from penstock.config.run import RunConfig
from penstock.errors import TrainingDiverged
from penstock_learner.algorithms.aggregation import apply_mask
from penstock_learner.batches.partition import partition
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.model.attention.sequence_parallel import make_sequence_parallel
from penstock_learner.model.backbone import ModelInputs
from penstock_learner.model.self_check import require_right
from penstock_learner.model.tensors import to_device
from penstock_learner.model.torch_settings import compute_dtype_of, set_up_torch
from penstock_learner.optim.optimizer import apply_gradients
from penstock_learner.roles.policy import open_policy
from penstock_learner.roles.trainer import TrainerRank


@dataclass(frozen=True)
class StepReport:
    """The numbers of one optimizer step. They are the same on every rank."""

    loss: float
    """Cross-entropy, averaged over the trained tokens of the batch."""
    grad_norm: float
    lr: float
    num_trained: int


class SupervisedRank(TrainerRank):
    """Minimises the cross-entropy, averaged over the trained tokens of the whole batch."""

    role = "policy"

    def __init__(self, config: RunConfig) -> None:
        """Join torchrun's process group, or make one with this process alone."""
        learner = config.learner
        set_up_torch(learner.threads_per_rank, compiles=learner.compile)
        torch.manual_seed(config.seed)
        use_gpu = torch.cuda.is_available()
        timeout = timedelta(seconds=learner.rank_timeout_s)
        backend = "cpu:gloo,cuda:nccl" if use_gpu else "gloo"
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        super().__init__(config, dist.get_rank(), dist.get_world_size())
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_gpu else torch.device("cpu")
        if use_gpu:
            torch.cuda.set_device(self.device)
        self.num_sharing = learner.sequence_parallel
        """Ranks that share each sequence. All of them see its whole loss."""
        self.num_skipped = 0
        """Steps in a row that were skipped, because a number was not finite."""

    def load(self) -> None:
        """Open the model, with an adapter if the config has one, and give it an optimizer. Collective."""
        self.model = open_policy(self.config)
        # The optimizer comes before the first forward pass, in which FSDP replaces the parameters for a while.
        self.prepare(self.model, self.config.learner.lr)
        require_right(self.model, "model.path", self.device, compute_dtype_of(self.config))
        self.parallel = make_sequence_parallel(self.num_sharing)

    def step(self, batch: SequenceBatch, num_done: int) -> StepReport:
        """Take one optimizer step after `num_done` others. Every rank gets the whole batch and trains its part."""
        learner = self.config.learner
        self.optimizer.zero_grad(set_to_none=True)
        num_trained = int(batch.loss_mask.sum())
        total = torch.zeros((), device=self.device)
        for micro in self._part(batch):
            loss = self._loss_sum(micro) / num_trained
            total += loss.detach()
            loss = loss + self._balance_loss(micro, num_trained)
            # FSDP averages gradients over ranks. The count of tokens is global, so the sum is needed.
            (loss * self.world_size).backward()
        taken = apply_gradients(self.model, self.optimizer, learner, num_done, lr=learner.lr, losses=total)
        self.num_skipped = self.num_skipped + 1 if taken.skipped else 0
        if self.num_skipped and self.num_skipped == learner.max_skipped_steps:
            raise TrainingDiverged(
                f"loss or gradient was not finite at step {num_done + 1} ({self.num_skipped} such steps in a row); "
                "lower learner.lr, or look at the data"
            )
        dist.all_reduce(total)
        return StepReport(float(total) / self.num_sharing, taken.grad_norm, taken.lr, num_trained)

    @torch.no_grad()
    def mean_loss(self, batches: Iterable[SequenceBatch]) -> float:
        """The loss of all batches, averaged over their trained tokens. Collective. Nothing is trained."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in batches:
            for micro in self._part(batch):
                sums += torch.stack([self._loss_sum(micro).double(), sums.new_tensor(micro.loss_mask.sum())])
        dist.all_reduce(sums)
        loss, num_trained = sums.tolist()
        return float(loss / num_trained)

    def agree(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. Collective."""
        votes = torch.tensor([int(flag)])
        dist.all_reduce(votes)
        return bool(votes.item())

    def _part(self, batch: SequenceBatch) -> list[SequenceBatch]:
        """The micro-batches of this rank, which are those of all ranks that share its sequences."""
        budget = self.config.learner.micro_batch_tokens * self.num_sharing
        shards = partition(batch, self.world_size // self.num_sharing, budget)
        return shards[self.rank // self.num_sharing].micro_batches

    def _loss_sum(self, micro: SequenceBatch) -> Tensor:
        log_probs, _ = self.model(ModelInputs.of(micro, self.device, self.parallel))
        return -apply_mask(log_probs, to_device(micro.loss_mask, self.device).bool()).sum()

    def _balance_loss(self, micro: SequenceBatch, num_trained: int) -> Tensor | float:
        """The auxiliary loss of a mixture of experts, weighted by the trained tokens of the micro-batch."""
        coefficient = self.config.learner.router.aux_loss_coefficient
        balance = self.model.watch.balance() if coefficient and self.model.watch is not None else None
        if balance is None:
            return 0.0
        # Ranks that share sequences compute the loss of their own tokens. Its mean over them counts.
        return coefficient / self.num_sharing * int(micro.loss_mask.sum()) / num_trained * balance.loss
