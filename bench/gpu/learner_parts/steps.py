"""The contenders of the learner's benchmark. Each takes one optimizer step on the same sequences."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from learner_parts.models import Setting, Shape
from penstock.config.learner import LearnerConfig
from penstock_learner.algorithms.aggregation import Denominators
from penstock_learner.batches.partition import partition
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.model import experts as fused_experts
from penstock_learner.model.architectures import ModelPath, path_of
from penstock_learner.model.attention import packed_attention
from penstock_learner.model.attention.sequence_parallel import SequenceParallel
from penstock_learner.model.causal_lm import CausalLM
from penstock_learner.model.loading import prepare_for_training
from penstock_learner.model.recurrent_layers import pack_recurrent_layers
from penstock_learner.model.routers import watch_routers
from penstock_learner.model.torch_settings import DTYPES
from penstock_learner.optim.optimizer import make_optimizer
from penstock_learner.roles.policy import PolicyUpdate

GIB = 2**30
LR = 1e-6


def start_only_rank() -> torch.device:
    """Make a process group of this process alone. Returns its device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return device


def make_batch(lengths: Sequence[int], vocabulary: int) -> SequenceBatch:
    """Random sequences with one prompt token each, so that nearly every token is trained."""
    random = np.random.default_rng(3)
    sizes = np.array(lengths, dtype=np.int64)
    num_responses = int(sizes.sum()) - len(sizes)
    return SequenceBatch(
        token_ids=random.integers(0, vocabulary, int(sizes.sum())),
        lengths=sizes,
        prompt_lengths=np.ones_like(sizes),
        rewards=random.integers(0, 2, len(sizes)).astype(np.float32),
        group_ids=np.arange(len(sizes)),
        loss_mask=np.ones(num_responses, dtype=np.uint8),
        behaviour_log_probs=np.full(num_responses, -np.log(vocabulary), dtype=np.float32),
        token_versions=np.zeros(num_responses, dtype=np.int64),
        temperatures=np.ones(num_responses, dtype=np.float32),
        advantages=random.normal(size=num_responses).astype(np.float32),
    )


def make_model(shape: Shape, dtype: torch.dtype, device: torch.device, implementation: str) -> Any:
    """A model with the same random weights for every contender."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(shape.config(), dtype=dtype, attn_implementation=implementation)


class Contender(Protocol):
    def step(self, batch: SequenceBatch) -> float | None: ...

    def state_bytes(self) -> int:
        """Bytes of parameters, gradients and Adam's state."""
        ...


class Plain:
    """Plain Hugging Face: bfloat16, sdpa, activation checkpointing, padded rows, whole logits, fused AdamW."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.device = device
        self.rows = shape.rows
        self.model = make_model(shape, torch.bfloat16, device, "sdpa")
        self.model.gradient_checkpointing_enable()
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=device.type == "cuda")

    def state_bytes(self) -> int:
        return sum(p.numel() * p.element_size() * 4 for p in self.model.parameters())

    def step(self, batch: SequenceBatch) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        num_tokens = len(batch.loss_mask)
        for first in range(0, batch.num_sequences, self.rows):
            part = batch.select(range(first, min(first + self.rows, batch.num_sequences)))
            log_probs, mask, old, advantages = self._forward(part, self.model)
            ratio = (log_probs - old).exp()
            (-(ratio * advantages * mask).sum() / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def log_probs(self, batch: SequenceBatch, *, exact: bool = False) -> Tensor:
        """Log-probs [T] of one row of sequences, in float32 if `exact`."""
        model = copy.deepcopy(self.model).float() if exact else self.model
        with torch.no_grad():
            log_probs, mask, _, _ = self._forward(batch, model)
        return log_probs[mask.bool()].float().cpu()

    def _forward(self, part: SequenceBatch, model: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-probs, mask, behaviour log-probs and advantages, [rows, longest - 1]."""
        ids, mask, old, advantages = (tensor.to(self.device) for tensor in padded(part))
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        log_probs = logits.float().log_softmax(-1).gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)
        return log_probs, mask[:, 1:], old, advantages


def padded(part: SequenceBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Right-padded ids and mask [rows, longest], and log-probs and advantages [rows, longest - 1]."""
    rows, longest = part.num_sequences, int(part.lengths.max())
    ids, mask = torch.zeros(rows, longest, dtype=torch.int64), torch.zeros(rows, longest, dtype=torch.int64)
    old, advantages = torch.zeros(rows, longest - 1), torch.zeros(rows, longest - 1)
    assert part.advantages is not None
    token, response = 0, 0
    for row, length in enumerate(part.lengths.tolist()):
        ids[row, :length] = torch.as_tensor(part.token_ids[token : token + length])
        mask[row, :length] = 1
        old[row, : length - 1] = torch.as_tensor(part.behaviour_log_probs[response : response + length - 1])
        advantages[row, : length - 1] = torch.as_tensor(part.advantages[response : response + length - 1])
        token, response = token + length, response + length - 1
    return ids, mask, old, advantages


class Ours:
    """The learner's own step: FSDP2, packed sequences, chunked log-probs, the PPO loss. If there are several ranks, all
    share its sequences. `changed` are settings of the learner; `padded` asks for Hugging Face's forward of padded
    rows; `experts` names who computes the experts of a mixture."""

    def __init__(
        self, shape: Shape, device: torch.device, masters: str, setting: Setting, compiled: bool, *,
        padded: bool = False, parallel: SequenceParallel | None = None, experts: str = fused_experts.NAME,
        **changed: Any,
    ) -> None:  # fmt: skip
        packed_attention.register()
        fused_experts.register()
        self.learner = LearnerConfig.model_validate(
            {
                "lr": LR,
                "activation_checkpointing": setting.recomputed,
                "activation_memory": setting.kept,
                "micro_batch_tokens": setting.tokens,
                "compute_dtype": "bfloat16",
                "master_dtype": masters,
                "compile": compiled,
                "algorithm": {"correction": {"mode": "bypass"}, "kl": {"placement": "none"}},
                **changed,
            }
        )
        lm = make_model(shape, DTYPES[masters], device, "sdpa" if padded else packed_attention.NAME)
        path = ModelPath("its padded path is measured") if padded else path_of(lm.config)
        assert path.is_packed != padded
        lm.set_experts_implementation(experts)
        pack_recurrent_layers(lm)
        self.model = CausalLM(lm, self.learner.logprob_chunk_tokens, path, compiled=compiled)
        self.model.watch = watch_routers(lm, self.learner)
        dtype = DTYPES[self.learner.compute_dtype]
        prepare_for_training(self.model, self.learner, dtype, is_cuda=device.type == "cuda")
        optimizer = make_optimizer(self.model, self.learner, LR)
        self.update = PolicyUpdate(self.model, optimizer, self.learner, device, parallel)
        self.num_steps = 0

    def state_bytes(self) -> int:
        return sum(p.numel() * p.element_size() * 4 for p in self.model.parameters())

    def step(self, batch: SequenceBatch, *, shares_prefixes: bool = False) -> float:
        """Take a step. Returns the norm of the gradient."""
        (shard,) = partition(batch, 1, self.learner.micro_batch_tokens, shares_prefixes=shares_prefixes)
        self.num_steps += 1
        report = self.update.run(shard, _denominators(batch), self.num_steps, 0, 0.0)
        assert not report.step.skipped
        return report.step.grad_norm

    def log_probs(self, batch: SequenceBatch) -> Tensor:
        (shard,) = partition(batch, 1, int(batch.lengths.sum()))
        return torch.as_tensor(self.update.log_probs(shard))


class Passes:
    """The forward and backward pass of the learner's step, without the optimizer."""

    def __init__(self, ours: Ours) -> None:
        self.ours = ours

    def state_bytes(self) -> int:
        return self.ours.state_bytes()

    def step(self, batch: SequenceBatch) -> None:
        update, learner = self.ours.update, self.ours.learner
        update.optimizer.zero_grad(set_to_none=True)
        (shard,) = partition(batch, 1, learner.micro_batch_tokens)
        for micro in shard.micro_batches:
            update.accumulate(micro, shard, _denominators(batch), 0, 0.0)


def _denominators(batch: SequenceBatch) -> Denominators:
    return Denominators.of(torch.as_tensor(batch.loss_mask), torch.as_tensor(batch.sequence_ids))


def time_steps(contender: Contender, batch: SequenceBatch, num_steps: int, device: torch.device) -> list[float]:
    """Real tokens per second of each step, after one discarded step."""
    rates = []
    for index in range(num_steps + 1):
        _wait(device)
        started = time.perf_counter()
        contender.step(batch)
        _wait(device)
        if index:
            rates.append(int(batch.lengths.sum()) / (time.perf_counter() - started))
    return rates


def peak_bytes(contender: Contender, batch: SequenceBatch, device: torch.device) -> int:
    """Peak memory of one step, everything included. 0 without a GPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    contender.step(batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def matmul_flops(device: torch.device) -> float:
    """FLOP/s of a large bfloat16 product: the best of several."""
    size, num_products = (8192, 20) if device.type == "cuda" else (256, 2)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = 0.0
    for _ in range(4):
        _wait(device)
        started = time.perf_counter()
        for _ in range(num_products):
            a @ b
        _wait(device)
        best = max(best, 2 * size**3 * num_products / (time.perf_counter() - started))
    return best


def clear(device: torch.device) -> None:
    """Free the GPU memory of a contender. Call this after its last reference is gone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
