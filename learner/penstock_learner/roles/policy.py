"""The policy role: trains the policy with FSDP2, gathers its weights, and (rank 0) publishes them.

`PolicyUpdate` is one update on one rank: forward and backward passes of the micro-batches, then the optimizer. It knows
nothing of Ray, the queue or publication. It needs a process group and a model from `prepare_for_training`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from penstock.config.learner import LearnerConfig
from penstock.config.run import RunConfig
from penstock.errors import WeightPushFailed
from penstock.weights.snapshot import FILE_NAME, find_damage
from penstock_learner.algorithms.aggregation import Denominators, aggregate, apply_mask
from penstock_learner.algorithms.losses import (
    CorrectionStatistics,
    LossInputs,
    LossStatistics,
    Mismatch,
    correct,
    interpolate_log_probs,
    kl_penalty,
    measure_mismatch,
    policy_loss,
)
from penstock_learner.batches.partition import RankShard
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.model.adapter import adapter_off, add_adapter
from penstock_learner.model.attention.packed_layout import ModelInputs, required_to_device, to_device, to_host, tree_of
from penstock_learner.model.attention.sequence_parallel import SequenceParallel
from penstock_learner.model.causal_lm import CausalLM, forward_log_probs, open_model
from penstock_learner.model.published_layout import PushedWeights, fit_to_folder
from penstock_learner.model.routers import Balance, watch_routers
from penstock_learner.model.self_check import require_right
from penstock_learner.model.torch_settings import DTYPES, compute_dtype_of
from penstock_learner.optim.optimizer import ScaledAdamW, apply_gradients
from penstock_learner.roles.dispatch import RouterReport, UpdateReport, dispatched
from penstock_learner.roles.trainer import TrainerRank
from penstock_learner.weights.publisher import WeightPublisher


def open_policy(config: RunConfig) -> CausalLM:
    """The model of `model.path`, with an adapter and watched routers if the config asks for them, on the meta device
    until `TrainerRank.prepare` reads its weights."""
    learner = config.learner
    model = open_model(
        config.model.path, DTYPES[learner.master_dtype], learner.logprob_chunk_tokens, compiled=learner.compile
    )
    fit_to_folder(model.lm, config.model.path, "model.path")
    if learner.lora is not None:
        add_adapter(model, learner.lora)
    model.watch = watch_routers(model.lm, learner)
    return model


@dataclass(frozen=True)
class _MicroReport:
    """The results of one micro-batch, as tensors on the device. They may not have been computed yet."""

    sums: Tensor
    """[3] loss, penalty and entropy."""
    statistics: LossStatistics
    correction: CorrectionStatistics
    mismatch: Mismatch
    log_probs: Tensor
    """[T] log-probs of the response tokens."""
    share: float
    """Its part of the trained tokens."""
    balance: Balance | None
    """How it used the experts. None for a dense model."""


@dataclass(frozen=True, eq=False)
class PolicyUpdate:
    model: CausalLM
    optimizer: ScaledAdamW
    learner: LearnerConfig
    device: torch.device
    parallel: SequenceParallel | None = None

    def run(
        self, part: RankShard, denominators: Denominators, step: int, version: int, kl_coefficient: float
    ) -> UpdateReport:
        """Take one optimizer step from weights of `version`, of which this rank computes its part. Collective."""
        self.optimizer.zero_grad(set_to_none=True)
        reports = [self.accumulate(micro, part, denominators, version, kl_coefficient) for micro in part.micro_batches]
        on_device = torch.stack([report.sums for report in reports])
        first = max(self.learner.critic_warmup_steps, 1)
        taken = apply_gradients(
            self.model,
            self.optimizer,
            self.learner,
            step - first,
            lr=self.learner.lr,
            losses=on_device[:, :2],
            hold=step < first,
        )
        sums = on_device.tolist()
        statistics, correction, mismatch = _on_host(
            reduce(add, [report.statistics for report in reports]),
            reduce(add, [report.correction for report in reports]),
            reduce(add, [report.mismatch for report in reports]),
        )
        nonfinite = tuple(index for index, (loss, kl, _) in enumerate(sums) if not math.isfinite(loss + kl))
        loss, kl, entropy = (sum(column) for column in zip(*sums, strict=True))
        proximal = None
        if self.learner.algorithm.correction.recomputes and part.micro_batches[0].old_log_probs is None:
            proximal = torch.cat([report.log_probs for report in reports]).cpu().numpy()  # the controller gave none
        routers = _router_report([(each.share, each.balance) for each in reports if each.balance is not None])
        return UpdateReport(loss, taken, nonfinite, kl, entropy, statistics, correction, mismatch, routers, proximal)

    def log_probs(self, part: RankShard) -> NDArray[np.float32]:
        return forward_log_probs(self.model, part, self.device, self.parallel)

    def accumulate(
        self, micro: SequenceBatch, part: RankShard, denominators: Denominators, version: int, kl_coefficient: float
    ) -> _MicroReport:
        """Run the forward and backward pass of one micro-batch. Gradients add up to those of the whole batch. Nothing
        is read back, so the host prepares the next micro-batch meanwhile."""
        config = self.learner.algorithm
        log_probs, entropy = self.model(
            ModelInputs.of(micro, self.device, self.parallel, tree=tree_of(micro, part, self.model))
        )
        mask, sequence_ids = to_device(micro.loss_mask, self.device).bool(), to_device(micro.sequence_ids, self.device)
        behaviour = to_device(micro.behaviour_log_probs, self.device)
        advantages = required_to_device(micro.advantages, self.device)
        old = self._proximal(micro, log_probs, behaviour)
        outputs = policy_loss(LossInputs(log_probs, old, advantages, mask, sequence_ids, behaviour), config.loss)
        numerator = log_probs.detach() if config.correction.mode == "bypass" else old
        correction = correct(numerator, behaviour, mask, sequence_ids, config.correction)
        mode = config.loss.aggregation_mode
        loss = aggregate(correction.apply(outputs.per_token), mask, sequence_ids, mode, denominators)
        kl_sum = torch.zeros_like(loss.detach())
        total = loss
        if micro.reference_log_probs is not None:
            reference = to_device(micro.reference_log_probs, self.device)
            kl = kl_penalty(log_probs, reference, correction.kept, config.kl.penalty)
            kl_sum = kl.detach().sum()
            if config.kl.in_loss:
                in_loss = config.kl.loss_penalty or config.kl.penalty
                if in_loss != config.kl.penalty:
                    kl = kl_penalty(log_probs, reference, correction.kept, in_loss)
                factor = config.kl.loss_factor(kl_coefficient)
                total = loss + factor * aggregate(kl, mask, sequence_ids, mode, denominators)
        if config.loss.entropy_coefficient:
            bonus = aggregate(apply_mask(entropy, mask), mask, sequence_ids, mode, denominators)
            total = total - config.loss.entropy_coefficient * bonus
        share = int(micro.loss_mask.sum()) / max(denominators.num_tokens, 1)
        balance = None if self.model.watch is None else self.model.watch.balance()
        if balance is not None and self.learner.router.aux_loss_coefficient > 0:
            # Ranks that share sequences compute the loss of their own tokens. Its mean over them counts.
            weight = share / (1 if self.parallel is None else self.parallel.size)
            total = total + self.learner.router.aux_loss_coefficient * weight * balance.loss
        # FSDP averages gradients over ranks. The denominators are global, so the sum is needed.
        (total * dist.get_world_size()).backward()
        versions = to_device(micro.unmixed_versions, self.device)
        mismatch = measure_mismatch(log_probs, behaviour, mask, versions, version)
        sums = torch.stack([loss.detach(), kl_sum, apply_mask(entropy.detach(), mask).sum()])
        own = log_probs.detach().float()
        return _MicroReport(sums, outputs.statistics, correction.statistics, mismatch, own, share, balance)

    def _proximal(self, micro: SequenceBatch, log_probs: Tensor, behaviour: Tensor) -> Tensor:
        """Log-probs of the proximal policy. A step's first update may lack them: its weights are that policy."""
        config = self.learner.algorithm.correction
        if config.mode == "bypass":
            return behaviour
        if config.proximal == "interpolated":
            return interpolate_log_probs(behaviour, log_probs, config.interpolation)
        return log_probs.detach() if micro.old_log_probs is None else to_device(micro.old_log_probs, self.device)


def _router_report(balances: Sequence[tuple[float, Balance]]) -> RouterReport | None:
    """The sums over micro-batches, each with its share of the tokens. Those that only fill up a rank do not count."""
    counted = [(share, balance) for share, balance in balances if share > 0]
    if not counted:
        return None
    return RouterReport(
        aux_loss=sum(share * float(balance.loss.detach()) for share, balance in counted),
        counts=torch.stack([balance.counts for _, balance in counted]).sum(dim=0).cpu().numpy(),
        replayed_share=sum(share * float(balance.replayed_share) for share, balance in counted),
    )


def _on_host(*parts: Any) -> list[Any]:
    """The sums of an update on the host: the controller may have no GPU."""
    copies = iter(to_host([getattr(part, each.name) for part in parts for each in fields(part)]))
    return [replace(part, **{each.name: next(copies) for each in fields(part)}) for part in parts]


class PolicyWorker(TrainerRank):
    role = "policy"

    def load(self) -> None:
        learner = self.config.learner
        self.model = open_policy(self.config)
        self.model.entropy_has_gradient = learner.algorithm.loss.entropy_coefficient != 0
        self.prepare(self.model, learner.lr)
        self.compute_dtype = compute_dtype_of(self.config)
        require_right(self.model, "model.path", self.device, self.compute_dtype, self.parallel)
        self.pushed = PushedWeights(self.model)
        self.policy_update = PolicyUpdate(self.model, self.optimizer, learner, self.device, self.parallel)
        host = self.config.learner.publish_host or self.node_address
        self.publisher = WeightPublisher(self.config, host, self.device) if self.rank == 0 else None
        """The controller calls its `push` and `write_snapshot` in the lane of the push, while training continues."""

    @dispatched(join="tokens")
    def log_probs(self, part: RankShard) -> NDArray[np.float32]:
        """[T] log-probs under the current weights, which are the proximal policy of the step."""
        return self.policy_update.log_probs(part)

    @dispatched(join="tokens")
    def reference_log_probs(self, part: RankShard) -> NDArray[np.float32]:
        """[T] log-probs under the weights that the run started from: the model's own, without its adapter."""
        with adapter_off(self.model):
            return self.policy_update.log_probs(part)

    @dispatched(join="reports")
    def update(
        self, part: RankShard, denominators: Denominators, step: int, version: int, kl_coefficient: float
    ) -> UpdateReport:
        """Take one optimizer step, of which this rank computes its part. Collective."""
        self.crash_point()
        return self.policy_update.run(part, denominators, step, version, kl_coefficient)

    def run_passes(self, part: RankShard, denominators: Denominators) -> None:
        self.policy_update.log_probs(part)
        for micro in part.micro_batches:
            self.policy_update.accumulate(micro, part, denominators, version=0, kl_coefficient=0.0)

    def gather_weights(self, policy_version: int, term: int, keep: list[int]) -> float:
        """Stage the current weights as a version. Collective. `keep` lists the versions that pushes still read. Returns
        the seconds that this rank has computed so far. A push of the version may begin before this returns: it sends
        each bucket as soon as it is filled. Afterwards the weights may change. A GPU may still be copying them, before
        anything that is enqueued later."""
        lora = self.config.learner.lora
        staged = None
        if self.publisher is not None:
            scale = lora.alpha / lora.rank if lora else None
            shapes, exact = self.pushed.shapes, self.pushed.exact
            staged = self.publisher.begin(policy_version, term, shapes, keep=keep, adapter_scale=scale, exact=exact)
        for name, weight in self.pushed.gathered(self.compute_dtype):
            if staged is not None:
                staged.put(name, weight)
        if self.config.learner.keeps_weights_on_host and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # a rewind overwrites what it still copies
        return self.computed_s

    def load_snapshot(self, folder: Path, weights_digest: str) -> None:
        """Load the weights of a snapshot and reset the optimizer. Collective. Raises WeightPushFailed, and changes
        nothing, if the snapshot is damaged or is not the published one."""
        damage = [find_damage(folder, weights_digest) if self.rank == 0 else ""]
        dist.broadcast_object_list(damage)
        if damage[0]:
            raise WeightPushFailed(damage[0])
        with safe_open(folder / FILE_NAME, framework="pt") as kept:
            self.pushed.load(kept.get_tensor)
        self.optimizer.state.clear()
