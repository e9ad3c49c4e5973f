"""The policy role: trains the policy with FSDP2, gathers its weights, and (rank 0) publishes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors import safe_open

from penstock.errors import WeightPushFailed
from penstock.weights.snapshot import FILE_NAME, find_damage
from penstock_learner.algorithms.aggregation import Denominators
from penstock_learner.batches.partition import RankShard
from penstock_learner.model.adapter import adapter_off
from penstock_learner.model.attention.sequence_parallel import make_sequence_parallel
from penstock_learner.model.precision import compute_dtype_of
from penstock_learner.model.self_check import require_right
from penstock_learner.roles.dispatch import dispatched
from penstock_learner.roles.policy_model import open_policy
from penstock_learner.roles.policy_update import PolicyUpdate
from penstock_learner.roles.trainer import TrainerRank
from penstock_learner.roles.update_reports import UpdateReport
from penstock_learner.weights.gathering import PushedWeights
from penstock_learner.weights.publisher import WeightPublisher
from penstock_learner.weights.push import PushReport, PushTarget


class PolicyWorker(TrainerRank):
    """One rank of the policy."""

    role = "policy"

    def load(self) -> None:
        learner = self.config.learner
        self.model = open_policy(self.config)
        self.model.entropy_has_gradient = learner.algorithm.loss.entropy_coefficient != 0
        self.prepare(self.model, learner.lr)
        require_right(self.model, "model.path", self.device, compute_dtype_of(self.config))
        parallel = make_sequence_parallel(learner.sequence_parallel)
        self.pushed = PushedWeights(self.model)
        self.policy_update = PolicyUpdate(self.model, self.optimizer, learner, self.device, parallel)
        host = self.config.learner.publish_host or self.node_address
        self.publisher = WeightPublisher(self.config, host, self.device) if self.rank == 0 else None

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

    def rehearse(self, part: RankShard, denominators: Denominators) -> None:
        """Compile everything that a step runs, on a batch that is not trained. Collective."""
        self.policy_update.rehearse(part, denominators)

    def gather_weights(self, policy_version: int, term: int, keep: list[int]) -> float:
        """Stage the current weights as a version. Collective. `keep` lists the versions that pushes still read.
        Returns the seconds that this rank has computed so far.

        A push of the version may begin before this returns: it sends each bucket as soon as it is filled. Afterwards
        the weights may change. A GPU may still be copying them, before anything that is enqueued later."""
        lora = self.config.learner.lora
        staged = None
        if self.publisher is not None:
            scale = lora.alpha / lora.rank if lora else None
            shapes, exact = self.pushed.shapes, self.pushed.exact
            staged = self.publisher.begin(policy_version, term, shapes, keep=keep, adapter_scale=scale, exact=exact)
        for name, weight in self.pushed.gathered(compute_dtype_of(self.config)):
            if staged is not None:
                staged.put(name, weight)
        if self.config.learner.cpu_offload and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # a roll back overwrites what it still copies
        return self.computed_s

    def load_snapshot(self, folder: Path, weights_digest: str) -> None:
        """Load the weights of a snapshot and reset the optimizer. Collective.

        Raises WeightPushFailed, and changes nothing, if the snapshot is damaged or is not the published one."""
        damage = [find_damage(folder, weights_digest) if self.rank == 0 else ""]
        dist.broadcast_object_list(damage)
        if damage[0]:
            raise WeightPushFailed(damage[0])
        with safe_open(folder / FILE_NAME, framework="pt") as kept:
            self.pushed.load(kept.get_tensor)
        self.optimizer.state.clear()

    def push(
        self, policy_version: int, targets: list[PushTarget], transport: str | None, base_version: int | None, lane: str
    ) -> PushReport:
        """Push a staged version to the targets. Called on rank 0, in the lane's thread, while training continues."""
        assert self.publisher is not None
        return self.publisher.push(policy_version, targets, transport=transport, base_version=base_version, lane=lane)

    def write_snapshot(self, policy_version: int, folder: Path) -> None:
        """Write a staged version to a folder. Called on rank 0, in the lane of pushes."""
        assert self.publisher is not None
        self.publisher.write_snapshot(policy_version, folder)
