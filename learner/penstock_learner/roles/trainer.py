"""Code that policy and critic share: FSDP2, AdamW, and their part of a checkpoint.

DCP is imported by the first checkpoint that is written or loaded: no step needs it."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import CheckpointDamaged, ConfigError, TrainingDiverged
from penstock.machine import measure_memory
from penstock_learner.algorithms.aggregation import Denominators
from penstock_learner.batches.partition import RankShard
from penstock_learner.checkpoints import FileRecord, find_damage
from penstock_learner.model.causal_lm import CausalLM
from penstock_learner.model.loading import is_adapter, prepare_for_training, read_weights
from penstock_learner.model.scalar_model import ScalarModel
from penstock_learner.model.torch_settings import compute_dtype_of
from penstock_learner.optim.optimizer import local_shard, make_optimizer
from penstock_learner.roles.dispatch import RankUsage
from penstock_learner.roles.rank import Rank
from penstock_learner.weights.staging import first_nonfinite


class TrainerRank(Rank):
    """A rank whose model is trained. Its `load` opens the model and calls `prepare`."""

    def prepare(self, model: CausalLM | ScalarModel, lr: float) -> None:
        """Shard the model over the role's ranks, read this rank's weights, and give it its own optimizer. Raises
        ConfigError if the role has the `offload` of roles that are not trained."""
        if getattr(self.settings, "offload", False):
            raise ConfigError(
                f"learner.roles.{self.role}.offload is for workers that are not trained; set learner.offload"
            )
        self.require_parallel(model)
        self.learner = learner = self.config.learner.training_of(self.role)
        """The settings that this role is trained with."""
        alone = {} if self.role == "policy" else {"expert_parallel": 1, "shard_size": 0}
        dtype, is_cuda = compute_dtype_of(self.config), self.device.type == "cuda"
        prepare_for_training(model, learner.model_copy(update=alone), dtype, is_cuda=is_cuda)
        read_weights(model, self.device, offload=learner.keeps_weights_on_host)
        self.optimizer = make_optimizer(model, learner, lr)
        self.trained: torch.nn.Module = model
        self.saving_group = dist.new_group(backend="gloo")
        """Process group of the thread that writes checkpoints, so its collectives do not mix with those of training."""

    def run_passes(self, part: RankShard, denominators: Denominators) -> None:
        """Run the passes of a step on a batch that is not trained, without the optimizer. Collective."""
        raise NotImplementedError

    def rehearse(self, part: RankShard, denominators: Denominators) -> None:
        """Compile everything that a step runs, on a batch that is not trained. Collective. Weights, the numbers of the
        optimizer and random numbers stay as they are."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            self.optimizer.zero_grad(set_to_none=True)
            self.run_passes(part, denominators)
            home = self.optimizer.param_groups[0]["params"][0].device
            self.optimizer.step_scaled(torch.full((), math.nan, device=home))  # compiles it, and changes nothing
            self.optimizer.zero_grad(set_to_none=True)

    def usage(self) -> RankUsage:
        if self.device.type == "cuda":
            peak, name = torch.cuda.max_memory_allocated(self.device), torch.cuda.get_device_name(self.device)
            reserved = torch.cuda.max_memory_reserved(self.device)
        else:
            unit = 1 if sys.platform == "darwin" else 1024
            peak, name, reserved = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "cpu", 0
        host = measure_memory()
        used = host.size_bytes - host.available_bytes if host else 0
        return RankUsage(peak, name, num_used_parameters(self.trained), reserved, used)

    def stage(self, folder: Path) -> None:
        """Copy this rank's shards to host memory and begin to write them. Collective. Training may then continue.
        Raises TrainingDiverged, on every rank, if a number is not finite: nothing is written then."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import async_save

        from penstock_learner.shards import HashingWriter

        state = self._state()
        if name := self._first_nonfinite(state):
            raise TrainingDiverged(
                f"the {self.role}'s {name} is not finite, so {folder.name} is not written; start the learner again to "
                "continue from the checkpoint before it, with a lower learning rate"
            )
        self.writer = HashingWriter(folder)
        # It copies within the call, to memory that is neither pinned nor shared, and keeps the copy until it is closed.
        self.stager = DefaultStager(StagingOptions(False, False, False, False))
        self.saving = async_save(
            state, storage_writer=self.writer, process_group=self.saving_group, async_stager=self.stager
        )

    def finish_saving(self) -> dict[str, FileRecord]:
        """Wait until the shards are written, and return the names and checksums of this rank's files. Called in a lane.
        The files count once the controller renames the folder."""
        assert isinstance(self.saving, Future)
        with _one_line_errors(self.writer.path):
            self.saving.result()
        self.stager.close()
        return self.writer.records

    def find_damage(self, checkpoint: Path, files: dict[str, FileRecord]) -> list[str]:
        return find_damage(checkpoint, files)

    def load_checkpoint(self, folder: Path) -> None:
        """Load shards written by any number of ranks. Collective. Raises CheckpointDamaged if one is not finite. Waits
        for a checkpoint that is still being written: two at once would mix their collectives. What is frozen beneath an
        adapter keeps the weights of the model folder, which servers have too."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        from penstock_learner.shards import load_shards

        if isinstance(saving := getattr(self, "saving", None), Future):
            saving.exception(self.config.learner.rank_timeout_s)
        state = self._state()
        weights = dict(self.trained.named_parameters(remove_duplicate=False))
        is_adapted = any(is_adapter(name) for name in weights)
        frozen = {name for name, weight in weights.items() if is_adapted and not weight.requires_grad}
        kept = {name: state["model"].pop(name) for name in frozen}
        with _one_line_errors(folder):
            load_shards(state, folder)
        state["model"] |= kept
        if name := self._first_nonfinite(state):
            raise CheckpointDamaged(f"{folder} holds weights that are not finite: {name}")
        set_state_dict(
            self.trained, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        torch.set_rng_state(state["rng"])

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model_state, optimizer_state = get_state_dict(self.trained, self.optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "rng": torch.get_rng_state()}

    def _first_nonfinite(self, state: dict[str, Any]) -> str:
        """The name of a weight or of an optimizer's number that is not finite on any rank, or an empty text."""
        own = first_nonfinite(_tensors("", {"model": state["model"], "optimizer": state["optimizer"]["state"]}))
        of_ranks: list[str] = [""] * self.world_size
        dist.all_gather_object(of_ranks, own)
        return next((name for name in of_ranks if name), "")


@contextmanager
def _one_line_errors(folder: Path | str | PathLike[str]) -> Iterator[None]:
    """Raise the first error of a rank in place of DCP's, which holds every rank's stack and is not an Exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        cause = next((each for each, _ in error.failures.values()), error)
        reason = (str(cause) or type(cause).__name__).splitlines()[0]
        raise OSError(f"{folder}: {reason}") from cause


def _tensors(path: str, state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's shards of every tensor in a nested dict, with their paths."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _tensors(f"{path}{name}.", value)
        elif isinstance(value, torch.Tensor):
            yield f"{path}{name}", local_shard(value)


def num_used_parameters(model: torch.nn.Module) -> int:
    """Parameters that one token passes through. Fused experts have one more dimension than other weights."""
    lm: Any = getattr(model, "lm", None)
    per_token = None if lm is None else getattr(lm.config.get_text_config(), "num_experts_per_tok", None)
    return sum(
        parameter.numel() * per_token // parameter.shape[0] if per_token and parameter.dim() == 3 else parameter.numel()
        for parameter in model.parameters()
    )
