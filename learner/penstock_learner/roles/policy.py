"""The policy role: trains the policy with FSDP2, gathers its weights, and (rank 0) publishes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

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
from penstock_learner.model import ModelInputs, add_adapter, load_model
from penstock_learner.packing import RankShard, SequenceBatch
from penstock_learner.roles.reference import forward_log_probs
from penstock_learner.roles.trainer import TrainerRank
from penstock_learner.weights.gathering import gathered_weights, pushed_shapes
from penstock_learner.weights.publisher import PushReport, WeightPublisher
from penstock_learner.weights.senders.sender import PushTarget


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
    grad_norm: float
    """Of the whole model: the same on every rank."""
    skipped: bool
    """True when the gradient was not finite and the step left the weights as they were."""


class PolicyWorker(TrainerRank):
    """One rank of the policy."""

    role = "policy"

    def load(self) -> None:
        learner = self.config.learner
        self.model = load_model(self.config.model.path, torch.float32, learner.logprob_chunk_tokens).to(self.device)
        if learner.lora is not None:
            add_adapter(self.model, learner.lora)
            self.model.to(self.device)
        self.prepare(self.model, learner.lr)
        host = self.config.learner.publish_host or self.node_address
        self.publisher = WeightPublisher(self.config, host, self.device) if self.rank == 0 else None

    def log_probs(self, part: RankShard) -> NDArray[np.float32]:
        """[T] under the current weights: the proximal policy of the step."""
        return forward_log_probs(self.model, part, self.device)

    def update(
        self, part: RankShard, denominators: Denominators, step: int, version: int, kl_coefficient: float
    ) -> UpdateReport:
        """One optimizer step over this rank's part. Collective: all ranks call it with the same step."""
        self.optimizer.zero_grad(set_to_none=True)
        reports = [self._accumulate(micro, denominators, version, kl_coefficient) for micro in part.micro_batches]
        hold = step <= self.config.learner.critic_warmup_steps
        grad_norm, skipped = self.apply_gradients(step, hold=hold)
        loss, kl, entropy, statistics, correction, mismatch = reports[0]
        for more in reports[1:]:
            loss, kl, entropy = loss + more[0], kl + more[1], entropy + more[2]
            statistics, correction, mismatch = statistics + more[3], correction.merge(more[4]), mismatch + more[5]
        return UpdateReport(loss, kl, entropy, statistics, correction, mismatch, grad_norm, skipped)

    def gather_weights(self, policy_version: int, term: int, keep: list[int]) -> None:
        """Stage the current weights as a version; `keep` are those that pushes still read. Collective.

        A push of the version may begin meanwhile: it takes each bucket when it is filled."""
        lora = self.config.learner.lora
        staged = None
        if self.publisher is not None:
            scale = lora.alpha / lora.rank if lora else None
            shapes = pushed_shapes(self.model)
            staged = self.publisher.begin(policy_version, term, shapes, keep=keep, adapter_scale=scale)
        for name, weight in gathered_weights(self.model):
            if staged is not None:
                staged.put(name, weight)

    def push(
        self, policy_version: int, targets: list[PushTarget], transport: str | None, base_version: int | None, lane: str
    ) -> PushReport:
        """Rank 0, in a thread of the lane beside training: bring a staged version to the targets."""
        assert self.publisher is not None
        return self.publisher.push(policy_version, targets, transport=transport, base_version=base_version, lane=lane)

    def write_snapshot(self, policy_version: int, folder: Path) -> None:
        assert self.publisher is not None
        self.publisher.write_snapshot(policy_version, folder)

    def _accumulate(
        self, micro: SequenceBatch, denominators: Denominators, version: int, kl_coefficient: float
    ) -> tuple[float, float, float, LossStatistics, CorrectionStatistics, Mismatch]:
        """Forward and backward of one micro-batch; gradients add up to those of the whole batch."""
        config = self.config.learner.algorithm
        log_probs, entropy = self.model(ModelInputs.of(micro, self.device))
        mask, sequence_ids = self.tensor(micro.loss_mask).bool(), self.tensor(micro.sequence_ids)
        behaviour, advantages = self.tensor(micro.behaviour_log_probs), self.tensor(micro.advantages)
        old = self._proximal(micro, log_probs, behaviour)
        outputs = policy_loss(LossInputs(log_probs, old, advantages, mask, sequence_ids, behaviour), config.loss)
        numerator = log_probs.detach() if config.correction.mode == "bypass" else old
        correction = correct(numerator, behaviour, mask, sequence_ids, config.correction)
        mode = config.loss.aggregation_mode
        loss = aggregate(correction.apply(outputs.per_token), mask, sequence_ids, mode, denominators)
        kl_sum = 0.0
        total = loss
        if micro.reference_log_probs is not None:
            reference = self.tensor(micro.reference_log_probs)
            kl = kl_penalty(log_probs, reference, correction.kept, config.kl.penalty)
            kl_sum = float(kl.detach().sum())
            if config.kl.placement == "loss":
                total = loss + kl_coefficient * aggregate(kl, mask, sequence_ids, mode, denominators)
        # FSDP averages gradients over ranks; the denominators are global, so the sum is wanted.
        (total * self.world_size).backward()
        mismatch = measure_mismatch(log_probs, behaviour, mask, self.tensor(micro.unmixed_versions), version)
        entropy_sum = float(apply_mask(entropy, mask).sum())
        return float(loss.detach()), kl_sum, entropy_sum, outputs.statistics, correction.statistics, mismatch

    def _proximal(self, micro: SequenceBatch, log_probs: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
        """`old` of the configured mode."""
        config = self.config.learner.algorithm.correction
        if config.mode == "bypass":
            return behaviour
        if config.proximal == "interpolated":
            return interpolate_log_probs(behaviour, log_probs, config.interpolation)
        return self.tensor(micro.old_log_probs)
