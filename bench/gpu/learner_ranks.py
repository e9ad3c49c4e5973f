"""Compares the learner's training step on 2 and 4 ranks, which share one GPU, with the same step on one rank.

    PYTHONPATH=.:learner:rollout_server:bench python bench/gpu/learner_ranks.py

It needs torch, transformers, peft and pydantic, and no Ray. The ranks are processes that meet over NCCL. NCCL refuses
two ranks on one GPU of one host, so each process says that it is a host of its own. Everything is real, except that the
bandwidth is a loopback's. The yardstick for equality is bfloat16's own error: the difference between one rank in
bfloat16 and one rank in float32. Without a GPU it runs a tiny model over gloo, to try the script.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from harness import Child, Results, ends_without, run_parts, save, say, sized
from learner_parts.models import SHAPES, Shape
from learner_parts.steps import clear, make_batch, make_model
from penstock.config.learner import LearnerConfig
from penstock.machine import free_port
from penstock_learner.batches.partition import partition, unpermute
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.model.adapter import add_adapter
from penstock_learner.model.architectures import path_of
from penstock_learner.model.attention import packed_attention
from penstock_learner.model.attention.sequence_parallel import make_sequence_parallel
from penstock_learner.model.causal_lm import CausalLM
from penstock_learner.model.sharding import prepare_for_training
from penstock_learner.model.torch_settings import DTYPES, set_up_torch
from penstock_learner.optim.optimizer import make_optimizer
from penstock_learner.roles.policy import PolicyUpdate
from penstock_learner.steps.stages import denominators_of

NAME = "learner_ranks"
IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if IS_CUDA else torch.device("cpu")
SHAPE = Shape(1024, 2816, 8, 16, 4, 32768, True, 8, 1024, 256) if IS_CUDA else SHAPES["tiny"]
MICRO_BATCH_TOKENS = 4096 if IS_CUDA else 64
MAX_RANKS = sized(4, 2)
NUM_STEPS = sized(4, 2)
LR = 1e-4
TIMEOUT_S = 100.0
MAX_LOSS_DIFFERENCE = 0.01
MAX_NORM_DIFFERENCE = 0.03
MAX_ERROR = 1.5
"""Largest mean difference of log-probs, as a multiple of bfloat16's own error."""


@dataclass(frozen=True)
class Case:
    name: str
    num_ranks: int
    settings: dict[str, Any] = field(default_factory=dict)
    like: str = "1 rank"
    """The case with one rank that must give the same result."""


LORA = {"lora": {"rank": 8, "alpha": 16}}
CASES = [
    Case("1 rank in float32", 1, {"compute_dtype": "float32"}, ""),
    Case("1 rank", 1),
    Case("2 ranks", 2),
    Case("4 ranks", 4),
    Case("2 ranks, Ulysses", 2, {"sequence_parallel": 2}),
    Case("2 ranks, cpu_offload", 2, {"cpu_offload": True}),
    Case("1 rank, LoRA", 1, LORA, ""),
    Case("2 ranks, LoRA", 2, LORA, "1 rank, LoRA"),
    Case("2 ranks, compile", 2, {"compile": True}),
]


@dataclass(frozen=True)
class Outcome:
    """What a case computed: over all ranks, for the same batch in every step."""

    log_probs: NDArray[np.float32]
    losses: list[float]
    norms: list[float]
    seconds: list[float]


class TrainingRank:
    """One rank, in a process of its own. It takes part in one case after the other."""

    def __init__(self) -> None:
        os.environ["NCCL_HOSTID"] = f"pid-{os.getpid()}"
        os.environ["NCCL_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.environ["NCCL_IB_DISABLE"] = "1"
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # this process may not have children
        set_up_torch(1, compiles=True)
        packed_attention.register()

    def is_ready(self) -> bool:
        """Answer once the imports are done, before the deadline of a case runs."""
        return True

    def run(self, rank: int, num_ranks: int, port: int, settings: dict[str, Any]) -> tuple[Any, ...]:
        """Take the steps of a case. Returns log-probs before the first, and loss, norm and seconds of each."""
        timeout = timedelta(seconds=TIMEOUT_S)
        store = dist.TCPStore("127.0.0.1", port, num_ranks, is_master=rank == 0, timeout=timeout)
        backend = "cpu:gloo,cuda:nccl" if IS_CUDA else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
        try:
            return self._run(rank, num_ranks, settings)
        finally:
            dist.destroy_process_group()
            clear(DEVICE)

    def _run(self, rank: int, num_ranks: int, settings: dict[str, Any]) -> tuple[Any, ...]:
        learner = learner_of(settings)
        update = PolicyUpdate(*make_trainable(learner), learner, DEVICE, make_sequence_parallel(share_of(learner)))
        batch = batch_of_bench()
        own = partition(batch, num_ranks // share_of(learner), tokens_of(learner))[rank // share_of(learner)]
        log_probs = update.log_probs(own)
        losses, norms, seconds = [], [], []
        for step in range(1, NUM_STEPS + 1):
            dist.barrier()
            started = time.perf_counter()
            report = update.run(own, denominators_of(batch, learner.algorithm.loss), step, 0, 0.0)
            if IS_CUDA:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            losses.append(report.loss)
            norms.append(report.step.grad_norm)
        return log_probs, losses, norms, seconds


def learner_of(settings: dict[str, Any]) -> LearnerConfig:
    fixed = {
        "lr": LR, "micro_batch_tokens": MICRO_BATCH_TOKENS, "compute_dtype": "bfloat16", "master_dtype": "float32",
        "policy": {"num_ranks": MAX_RANKS},
        "algorithm": {"correction": {"mode": "bypass"}, "kl": {"placement": "none"}},
    }  # fmt: skip
    return LearnerConfig.model_validate(fixed | settings)


def make_trainable(learner: LearnerConfig) -> tuple[CausalLM, Any]:
    """The same model on every rank, sharded, with its optimizer."""
    place = torch.device("cpu") if learner.cpu_offload else DEVICE
    lm = make_model(SHAPE, torch.float32, DEVICE, packed_attention.NAME).to(place)
    model = CausalLM(lm, learner.logprob_chunk_tokens, path_of(lm.config), compiled=learner.compile)
    if learner.lora is not None:
        torch.manual_seed(1)
        add_adapter(model, learner.lora)
    prepare_for_training(model, learner, DTYPES[learner.compute_dtype], is_cuda=IS_CUDA)
    return model, make_optimizer(model, learner, LR)


def batch_of_bench() -> SequenceBatch:
    lengths = np.random.default_rng(5).integers(SHAPE.shortest, SHAPE.length + 1, 2 * SHAPE.rows)
    return make_batch([int(length) for length in lengths], SHAPE.vocabulary)


def share_of(learner: LearnerConfig) -> int:
    return learner.sequence_parallel


def tokens_of(learner: LearnerConfig) -> int:
    return learner.micro_batch_tokens * learner.sequence_parallel


def run_case(ranks: list[Child], case: Case) -> Outcome:
    port = free_port()
    taking_part = ranks[: case.num_ranks]
    for rank, child in enumerate(taking_part):
        child.ask("run", rank, case.num_ranks, port, case.settings)
    answers = [child.answer(case.name, TIMEOUT_S) for child in taking_part]
    learner = learner_of(case.settings)
    share = share_of(learner)
    shards = partition(batch_of_bench(), case.num_ranks // share, tokens_of(learner))
    log_probs = unpermute([answer[0] for answer in answers[::share]], shards, batch_of_bench())
    losses = [sum(each) for each in zip(*(answer[1] for answer in answers[::share]), strict=True)]
    seconds = [max(each) for each in zip(*(answer[3] for answer in answers), strict=True)]
    return Outcome(log_probs, losses, answers[0][2], seconds)


def bench() -> Results:
    results = Results()
    num_tokens = int(batch_of_bench().lengths.sum())
    ranks = [Child(TrainingRank) for _ in range(MAX_RANKS)]
    for child in ranks:
        child.call("is_ready")
    outcomes: dict[str, Outcome] = {}
    try:
        for case in CASES:
            outcome = outcomes[case.name] = run_case(ranks, case)
            say(f"{case.name}: losses {[round(loss, 4) for loss in outcome.losses]}, norms {outcome.norms}")
            results.add(case.name, "tokens/s", *(num_tokens / seconds for seconds in outcome.seconds[1:]))
            if case.name == "1 rank":
                bfloat16_error = difference(outcome, outcomes["1 rank in float32"])
                results.add("log-probs in bfloat16, mean difference to float32", "nats", bfloat16_error)
            elif case.like:
                judge(results, case.name, outcome, outcomes[case.like], bfloat16_error)
            save(results)
    finally:
        for child in ranks:
            child.stop()
    return results


def judge(results: Results, name: str, outcome: Outcome, one: Outcome, bfloat16_error: float) -> None:
    error = difference(outcome, one) / bfloat16_error
    loss = max(abs(a - b) for a, b in zip(outcome.losses, one.losses, strict=True))
    norm = max(abs(a / b - 1) for a, b in zip(outcome.norms, one.norms, strict=True))
    results.bar(f"{name}: log-probs against one rank / bfloat16's error", error, MAX_ERROR, at_most=True)
    results.bar(f"{name}: loss against one rank", loss, MAX_LOSS_DIFFERENCE, at_most=True)
    results.bar(f"{name}: gradient norm against one rank", norm, MAX_NORM_DIFFERENCE, at_most=True)


def difference(a: Outcome, b: Outcome) -> float:
    return float(np.abs(a.log_probs - b.log_probs).mean())


def main() -> int:
    ends_without("ranks on a GPU")
    is_met = run_parts(NAME, "the learner on several ranks of one GPU", ["ranks"], {"ranks": 280.0}, lambda _: bench())
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
