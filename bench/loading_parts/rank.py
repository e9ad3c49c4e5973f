"""One rank of the loading benchmarks. It says how much memory it needs at most in each phase.

    PYTHONPATH=bench python bench/loading_parts/rank.py JOB.json RANK

The job names the model folder, the way to load it, the phases, and where the ranks meet. Each rank writes
`JOB.RANK.json`: the bytes of its part of the model and of the largest layer and, for each phase, the peak of device and
host memory. Host memory is what came on top of the process with its libraries and its process group.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

os.environ["NCCL_HOSTID"] = f"pid-{os.getpid()}"  # lets several ranks share one GPU
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist

from loading_parts.jobs import Job
from penstock.config.loading import validate
from penstock.weights.deadline import Deadline
from penstock_learner.batches.partition import partition
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.model.architectures import path_of
from penstock_learner.model.attention import packed_attention
from penstock_learner.model.backbone import decoder_layers
from penstock_learner.model.causal_lm import CausalLM, open_model
from penstock_learner.model.loading import read_weights
from penstock_learner.model.self_check import require_right
from penstock_learner.model.sharding import prepare_for_training
from penstock_learner.model.torch_settings import DTYPES, compute_dtype_of, set_up_torch
from penstock_learner.optim.optimizer import local_shard, make_optimizer
from penstock_learner.roles.policy import PolicyUpdate
from penstock_learner.steps.stages import denominators_of
from penstock_learner.weights.gathering import PushedWeights
from penstock_learner.weights.publisher import WeightPublisher


def main() -> None:
    job, rank = Job(**json.loads(Path(sys.argv[1]).read_text())), int(sys.argv[2])
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
    set_up_torch(1, compiles=False)
    store = dist.FileStore(  # type: ignore[attr-defined]
        str(job.path.with_suffix(".store")), job.num_ranks
    )
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=job.num_ranks,
        timeout=timedelta(seconds=300),
    )
    dist.all_reduce(torch.ones(1, device=device))
    packed_attention.register()
    RankBench(job, rank, device).run()
    dist.destroy_process_group()


class RankBench:
    """Runs the phases of a job, one after another, on one model."""

    def __init__(self, job: Job, rank: int, device: torch.device) -> None:
        learner = {
            "policy": {"num_ranks": job.num_ranks},
            "master_dtype": job.master_dtype,
            "micro_batch_tokens": job.micro_batch_tokens,
            "algorithm": {"correction": {"mode": "bypass"}, "kl": {"placement": "none"}},
        }
        config = {
            "model": {"path": job.folder, "dtype": "bfloat16"},
            "learner": learner,
            "weights": {"staging": "host"},
        }
        self.job = job
        self.config = validate(config, "bench")
        self.rank = rank
        self.device = device
        self.checkpoint = Path(job.work) / "checkpoint"
        open_model(self.config.model.path, torch.float32, 1)  # imports everything
        gc.collect()
        self.base = _resident_bytes()
        self.peaks: dict[str, dict[str, int]] = {}

    def run(self) -> None:
        self.measure("read", self.read)
        for phase in self.job.phases:
            try:
                self.measure(phase, getattr(self, phase))
            except torch.OutOfMemoryError as error:
                print(f"{self.job.name}, {phase}: {str(error).splitlines()[0]}", flush=True)
                os._exit(3)
        lm = self.model.lm
        layers = [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in decoder_layers(lm)[1]]
        whole = sum(p.numel() * p.element_size() for p in lm.parameters())
        said = {
            "part_bytes": sum(local_shard(p).nbytes for p in lm.parameters()),
            "layer_bytes": max(layers),
            "root_bytes": whole - sum(layers),
            "state_bytes": sum(
                local_shard(value).nbytes
                for state in self.optimizer.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor)
            ),
            "peaks": self.peaks,
        }
        self.job.path.with_suffix(f".{self.rank}.json").write_text(json.dumps(said))

    def measure(self, phase: str, call: Callable[[], None]) -> None:
        gc.collect()
        dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory
        call()
        on_device = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        self.peaks[phase] = {"device": on_device, "host": _resident_bytes("VmHWM") - self.base}
        dist.barrier()

    def read(self) -> None:
        path, dtype = self.config.model.path, DTYPES[self.job.master_dtype]
        chunk = self.config.learner.logprob_chunk_tokens
        if self.job.way == "ours":
            self.model = open_model(path, dtype, chunk)
        else:
            from transformers import AutoModelForCausalLM

            lm: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=packed_attention.NAME)
            self.model = CausalLM(lm, chunk, path_of(lm.config))
            self.model.to(self.device)
        learner = self.config.learner
        prepare_for_training(self.model, learner, compute_dtype_of(self.config), is_cuda=self.device.type == "cuda")
        read_weights(self.model, self.device)
        self.optimizer = make_optimizer(self.model, learner, learner.lr)

    def check(self) -> None:
        require_right(self.model, "model.path", self.device, compute_dtype_of(self.config))

    def step(self) -> None:
        """Two micro-batches: gradients are in memory when the second one begins, and Adam's state from the start."""
        learner = self.config.learner
        batch = random_batch(self.job.num_ranks * 2 * learner.micro_batch_tokens, self.model.lm.config.vocab_size)
        shards = partition(batch, self.job.num_ranks, learner.micro_batch_tokens)
        self.state()
        self.optimizer.zero_grad(set_to_none=True)
        update = PolicyUpdate(self.model, self.optimizer, learner, self.device)
        report = update.run(shards[self.rank], denominators_of(batch, learner.algorithm.loss), 1, 0, 0.0)
        assert report.step is not None and not report.step.skipped

    def state(self) -> None:
        """Bring gradients and Adam's state into memory, as after a step, without its passes."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        self.optimizer.step()

    def gather(self) -> None:
        for _ in PushedWeights(self.model).gathered(compute_dtype_of(self.config)):
            pass

    def push(self) -> None:
        """Stage two versions on rank 0, as if the first were still being sent."""
        publisher = WeightPublisher(self.config, "127.0.0.1", self.device) if self.rank == 0 else None
        pushed = PushedWeights(self.model)
        for version in (1, 2):
            staged = publisher.begin(version, 1, pushed.shapes, keep=[1]) if publisher is not None else None
            for name, weight in pushed.gathered(compute_dtype_of(self.config)):
                if staged is not None:
                    staged.put(name, weight)
            if staged is not None:
                staged.wait_sealed(Deadline(300, "staging"))

    def save(self) -> None:
        trainer = self.trainer()
        trainer.stage(self.checkpoint)
        trainer.finish_saving()

    def restore(self) -> None:
        self.trainer().restore(self.checkpoint)

    def trainer(self) -> Any:
        """The rank of a role with this model. It needs Ray."""
        from penstock_learner.roles.trainer import TrainerRank

        trainer = TrainerRank(self.config, self.rank, self.job.num_ranks)
        trainer.device, trainer.trained, trainer.optimizer = self.device, self.model, self.optimizer
        trainer.saving_group = dist.new_group(backend="gloo")
        return trainer


def random_batch(num_tokens: int, vocabulary: int, length: int = 2048) -> SequenceBatch:
    """Random sequences with one prompt token each."""
    random = np.random.default_rng(3)
    sizes = np.full(num_tokens // length, length, dtype=np.int64)
    num_responses = int(sizes.sum()) - len(sizes)
    return SequenceBatch(
        token_ids=random.integers(0, vocabulary, int(sizes.sum())),
        lengths=sizes,
        prompt_lengths=np.ones_like(sizes),
        temperatures=np.ones(num_responses, dtype=np.float32),
        rewards=np.zeros(len(sizes), dtype=np.float32),
        group_ids=np.arange(len(sizes)),
        loss_mask=np.ones(num_responses, dtype=np.uint8),
        behaviour_log_probs=np.full(num_responses, -np.log(vocabulary), dtype=np.float32),
        token_versions=np.zeros(num_responses, dtype=np.int64),
        advantages=random.normal(size=num_responses).astype(np.float32),
    )


def _resident_bytes(field: str = "VmRSS") -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
