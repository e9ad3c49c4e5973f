"""Supervised fine-tuning with the learner's own packed FSDP2 model, without Ray: each process is a rank.

`penstock sft` runs one rank. `torchrun --nproc-per-node N -m penstock.cli.main sft …` runs N, which share the batches.
Model, optimizer, schedule, precision and memory settings come from the run's config.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported, but not listed

from penstock.config.learner import LearnerConfig
from penstock.config.run import RunConfig
from penstock.errors import TrainingDiverged
from penstock_learner.algorithms.segments import apply_mask
from penstock_learner.export import write_folder
from penstock_learner.model.backbone import ModelInputs
from penstock_learner.model.causal_lm import CausalLM, load_model, open_model
from penstock_learner.model.device_copies import to_device
from penstock_learner.model.loading.weights import read_weights
from penstock_learner.model.packing import SequenceBatch, partition
from penstock_learner.model.precision import DTYPES, compute_dtype_of
from penstock_learner.model.self_check import require_right
from penstock_learner.model.sharding import full_weight, prepare_for_training
from penstock_learner.model.torch_settings import set_up_torch
from penstock_learner.optim.optimizer import apply_gradients, make_optimizer
from penstock_learner.sft.data import batch_of_examples, read_examples

logger = logging.getLogger(__name__)


def fine_tune(config: RunConfig, data: Path, out: Path, *, num_epochs: int, batch_size: int) -> None:
    """Train on the file's rows and write the model as a Hugging Face folder.

    The rows are shuffled for each epoch, with the config's `seed`."""
    from transformers import AutoTokenizer

    examples = read_examples(data, AutoTokenizer.from_pretrained(config.model.path, local_files_only=True))
    num_steps = num_epochs * -(-len(examples) // batch_size)
    learner = LearnerConfig.model_validate(config.learner.model_dump() | {"num_steps": num_steps})
    device = _join(learner)
    try:
        trainer = SupervisedTrainer(config, learner, device)
        random = np.random.default_rng(config.seed)
        for _ in range(num_epochs):
            order = random.permutation(len(examples)).tolist()
            for first in range(0, len(order), batch_size):
                loss = trainer.step(batch_of_examples([examples[i] for i in order[first : first + batch_size]]))
                if dist.get_rank() == 0:
                    logger.info("step %d of %d loss %.4f", trainer.num_steps, num_steps, loss)
        _write(trainer.model, config, out)
    finally:
        dist.destroy_process_group()


class SupervisedTrainer:
    """Minimises the cross-entropy, averaged over the trained tokens of the whole batch."""

    def __init__(self, config: RunConfig, learner: LearnerConfig, device: torch.device) -> None:
        self.learner = learner
        self.device = device
        self.model: CausalLM = open_model(
            config.model.path,
            DTYPES[learner.master_dtype],
            learner.logprob_chunk_tokens,
            compiled=learner.compile,
        )
        prepare_for_training(self.model, learner, compute_dtype_of(config), is_cuda=device.type == "cuda")
        read_weights(self.model, device, offload=learner.cpu_offload)
        require_right(self.model, "model.path", device, compute_dtype_of(config))
        self.optimizer = make_optimizer(self.model, learner, learner.lr)
        self.num_steps = 0
        self.num_skipped = 0

    def step(self, batch: SequenceBatch) -> float:
        """Take one optimizer step. Every rank gets the whole batch and trains its part. Returns the batch's loss."""
        self.num_steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        num_ranks, num_tokens = dist.get_world_size(), len(batch.loss_mask)
        shard = partition(batch, num_ranks, self.learner.micro_batch_tokens)[dist.get_rank()]
        total = torch.zeros((), device=self.device)
        for micro in shard.micro_batches:
            log_probs, _ = self.model(ModelInputs.of(micro, self.device))
            mask = to_device(micro.loss_mask, self.device).bool()
            loss = -apply_mask(log_probs, mask).sum() / num_tokens
            # FSDP averages gradients over ranks. The count of tokens is global, so the sum is needed.
            (loss * num_ranks).backward()
            total += loss.detach()
        taken = apply_gradients(
            self.model, self.optimizer, self.learner, self.num_steps, lr=self.learner.lr, losses=total
        )
        self.num_skipped = self.num_skipped + 1 if taken.skipped else 0
        if self.num_skipped and self.num_skipped == self.learner.max_skipped_steps:
            raise TrainingDiverged(
                f"loss or gradient was not finite at step {self.num_steps} ({self.num_skipped} such steps in a row); "
                "lower learner.lr, or look at the data"
            )
        dist.all_reduce(total)
        return float(total)


@torch.no_grad()
def _write(model: CausalLM, config: RunConfig, out: Path) -> None:
    """Write the trained weights as a Hugging Face folder. Only rank 0 holds the whole model, in host memory."""
    is_writer = dist.get_rank() == 0
    plain = load_model(config.model.path, torch.float32, chunk_tokens=1).lm if is_writer else None
    for name, parameter in model.lm.named_parameters():
        whole = full_weight(parameter.detach())
        if plain is not None:
            plain.get_parameter(name).copy_(whole)
    if plain is not None:
        write_folder(plain, config.model.path, out, config.model.dtype)


def _join(learner: LearnerConfig) -> torch.device:
    """Join torchrun's process group, or make one with this process alone. Returns the device."""
    set_up_torch(learner.threads_per_rank, compiles=learner.compile)
    use_gpu = torch.cuda.is_available()
    timeout = timedelta(seconds=learner.rank_timeout_s)
    backend = "cpu:gloo,cuda:nccl" if use_gpu else "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    if not use_gpu:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
