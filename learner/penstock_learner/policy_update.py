"""One training step of the policy on one rank: micro-batches forward and backward, then the optimizer.

Knows nothing of Ray, the queue or publication: it needs a model that `prepare` made, and a process group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from penstock.config.learner import LearnerConfig
from penstock_learner.algorithms.aggregation import Denominators, aggregate
from penstock_learner.algorithms.corrections import (
    CorrectionStatistics,
    Mismatch,
    correct,
    interpolate_log_probs,
    measure_mismatch,
)
from penstock_learner.algorithms.kl import kl_penalty
from penstock_learner.algorithms.losses import LossInputs, LossStatistics, policy_loss
from penstock_learner.algorithms.segments import apply_mask
from penstock_learner.model import ModelInputs, PackedCausalLM
from penstock_learner.optimizer import OptimizerStep, apply_gradients
from penstock_learner.packing import RankShard, SequenceBatch
from penstock_learner.sequence_parallel import SequenceParallel


@dataclass(frozen=True)
class UpdateReport:
    """Sums over one rank's part of a step; the controller adds the ranks' and divides once."""

    loss: float
    """This rank's share of the policy loss."""
    kl: float
    """Sum over trained tokens of the penalty."""
    entropy: float
    """Sum over trained tokens."""
    statistics: LossStatistics
    correction: CorrectionStatistics
    mismatch: Mismatch
    step: OptimizerStep | None = None
    """Of the whole model: the same on every rank."""
    nonfinite: tuple[int, ...] = ()
    """The micro-batches whose loss was not finite."""

    def __add__(self, other: UpdateReport) -> UpdateReport:
        """Of two micro-batches."""
        return UpdateReport(
            self.loss + other.loss,
            self.kl + other.kl,
            self.entropy + other.entropy,
            self.statistics + other.statistics,
            self.correction.merge(other.correction),
            self.mismatch + other.mismatch,
        )


class PolicyUpdate:
    """The policy's model and optimizer as something that takes steps."""

    def __init__(
        self,
        model: PackedCausalLM,
        optimizer: torch.optim.Optimizer,
        learner: LearnerConfig,
        device: torch.device,
        parallel: SequenceParallel | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.learner = learner
        self.device = device
        self.parallel = parallel

    def run(
        self, part: RankShard, denominators: Denominators, step: int, version: int, kl_coefficient: float
    ) -> UpdateReport:
        """One optimizer step over this rank's part. Collective: all ranks call it with the same step."""
        self.optimizer.zero_grad(set_to_none=True)
        reports = [self._accumulate(micro, denominators, version, kl_coefficient) for micro in part.micro_batches]
        nonfinite = tuple(index for index, report in enumerate(reports) if not math.isfinite(report.loss + report.kl))
        hold = step <= self.learner.critic_warmup_steps
        taken = apply_gradients(
            self.model, self.optimizer, self.learner, step, lr=self.learner.lr, is_finite=not nonfinite, hold=hold
        )
        total = reports[0]
        for report in reports[1:]:
            total += report
        return replace(total, step=taken, nonfinite=nonfinite)

    def log_probs(self, part: RankShard) -> NDArray[np.float32]:
        """[T] of every micro-batch under the current weights, without gradient."""
        return forward_log_probs(self.model, part, self.device, self.parallel)

    def _accumulate(
        self, micro: SequenceBatch, denominators: Denominators, version: int, kl_coefficient: float
    ) -> UpdateReport:
        """Forward and backward of one micro-batch; gradients add up to those of the whole batch."""
        config = self.learner.algorithm
        log_probs, entropy = self.model(ModelInputs.of(micro, self.device, self.parallel))
        mask, sequence_ids = self._tensor(micro.loss_mask).bool(), self._tensor(micro.sequence_ids)
        behaviour, advantages = self._tensor(micro.behaviour_log_probs), self._tensor(micro.advantages)
        old = self._proximal(micro, log_probs, behaviour)
        outputs = policy_loss(LossInputs(log_probs, old, advantages, mask, sequence_ids, behaviour), config.loss)
        numerator = log_probs.detach() if config.correction.mode == "bypass" else old
        correction = correct(numerator, behaviour, mask, sequence_ids, config.correction)
        mode = config.loss.aggregation_mode
        loss = aggregate(correction.apply(outputs.per_token), mask, sequence_ids, mode, denominators)
        kl_sum = 0.0
        total = loss
        if micro.reference_log_probs is not None:
            reference = self._tensor(micro.reference_log_probs)
            kl = kl_penalty(log_probs, reference, correction.kept, config.kl.penalty)
            kl_sum = float(kl.detach().sum())
            if config.kl.placement == "loss":
                total = loss + kl_coefficient * aggregate(kl, mask, sequence_ids, mode, denominators)
        # FSDP averages gradients over ranks; the denominators are global, so the sum is wanted.
        (total * dist.get_world_size()).backward()
        mismatch = measure_mismatch(log_probs, behaviour, mask, self._tensor(micro.unmixed_versions), version)
        entropy_sum = float(apply_mask(entropy, mask).sum())
        return UpdateReport(
            float(loss.detach()), kl_sum, entropy_sum, outputs.statistics, correction.statistics, mismatch
        )

    def _proximal(self, micro: SequenceBatch, log_probs: Tensor, behaviour: Tensor) -> Tensor:
        """`old` of the configured mode."""
        config = self.learner.algorithm.correction
        if config.mode == "bypass":
            return behaviour
        if config.proximal == "interpolated":
            return interpolate_log_probs(behaviour, log_probs, config.interpolation)
        return self._tensor(micro.old_log_probs)

    def _tensor(self, array: NDArray[np.generic] | None) -> Tensor:
        assert array is not None, "the controller filled in what the algorithm needs"
        return torch.as_tensor(array, device=self.device)


def forward_log_probs(
    model: PackedCausalLM, part: RankShard, device: torch.device, parallel: SequenceParallel | None = None
) -> NDArray[np.float32]:
    """A forward pass without gradient over every micro-batch."""
    with torch.no_grad():
        results = [
            model(ModelInputs.of(micro, device, parallel))[0].float().cpu().numpy() for micro in part.micro_batches
        ]
    joined: NDArray[np.float32] = np.concatenate(results)
    return joined
