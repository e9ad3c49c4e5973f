"""Optimizer steps of a random Qwen2: float32 masters, forward and backward in bfloat16, AdamW as the learner's.

The masters are not numbers of bfloat16, as in the middle of a run. The masters of a model that was just loaded from
bfloat16 are, and its first steps change fewer weights.

The member has weights but does not generate: a commit copies the stage into them, as an engine does.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from harness import be_a_host_of_its_own
from penstock.config.learner import LearnerConfig
from penstock.config.run import RunConfig
from penstock.v1 import weights_pb2
from penstock.weights.transports import MIX64, weights_digest
from penstock_rollout.engines.engine import CommitReport
from penstock_rollout.fleet.membership import reported_nccl_version
from penstock_rollout.weights.stage import StageSlot, bucket_checksum, device_uuid
from weights_gpu_parts.engine import SHAPES, member

START_TIMEOUT_S = 60.0


class ResidentEngine:
    """Serves the weights that it has copied from a verified stage."""

    name = "resident"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.devices = (device_uuid(device),)
        self.policy_version = 0
        self.weights_digest = ""
        self.weights: dict[str, torch.Tensor] = {}
        self._slot = StageSlot(Path("unused"), device)

    @property
    def retained_version(self) -> int | None:
        loaded = self._slot.loaded
        return loaded.kept_version if loaded is not None else None

    async def stage_weights(self, announcement: weights_pb2.AnnounceRequest) -> None:
        self._slot.begin(announcement)

    async def commit_weights(self, policy_version: int, bucket_checksums: list[str], timeout_s: float) -> CommitReport:
        stage = await asyncio.to_thread(self._slot.verified, policy_version, bucket_checksums, timeout_s)
        named = list(stage.tensors())
        if not self.weights:
            self.weights = {name: torch.empty_like(tensor, device=self.device) for name, tensor in named}
        started = time.monotonic()
        for name, tensor in named:
            self.weights[name].copy_(tensor)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        load_s = time.monotonic() - started
        self._slot.loaded = stage
        self.policy_version, self.weights_digest = policy_version, weights_digest(bucket_checksums)
        return CommitReport(stage.receive_s, load_s, paused_s=load_s, running_requests=0)

    async def abort_weights(self) -> None:
        self._slot.abort()


class MemberProcess:
    """Runs the member's gRPC service in a thread. This is the object of a Child."""

    def __init__(self, config: RunConfig, device_type: str) -> None:
        be_a_host_of_its_own()
        self._engine = ResidentEngine(torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu"))
        self._target: Future[dict[str, Any]] = Future()
        threading.Thread(target=lambda: asyncio.run(self._serve(config)), daemon=True).start()

    async def _serve(self, config: RunConfig) -> None:
        async with member(config, self._engine) as target:
            self._target.set_result(target | {"nccl_version": reported_nccl_version(self._engine.devices)})
            await asyncio.Event().wait()

    def target(self) -> dict[str, Any]:
        return self._target.result(START_TIMEOUT_S)

    def checksums(self) -> dict[str, str]:
        """The checksum of every weight that would serve now."""
        return tensor_checksums(self._engine.weights)


def tensor_checksums(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: bucket_checksum(MIX64, tensor.view(-1).view(torch.uint8)) for name, tensor in weights.items()}


LR = 1e-6
NUM_SEQUENCES = 2
SEQUENCE_TOKENS = {"cuda": 1024, "cpu": 32}
INIT_STD = 0.02
SEED = 1


class SteppedModel:
    """The model and its masters. Each master is updated as soon as its gradient is there, and the gradient is freed:
    a model of 7B then fits on one GPU. The gradients are not clipped, which would not change AdamW's first step."""

    def __init__(self, shape: str, device: torch.device, *, keeps_first: bool) -> None:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        learner = LearnerConfig()
        torch.manual_seed(SEED)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                config = Qwen2Config(**SHAPES[shape], max_position_embeddings=4096, use_cache=False)
                self.model: Any = Qwen2ForCausalLM(config)
        finally:
            torch.set_default_dtype(torch.float32)
        self.model.train()
        self.model.gradient_checkpointing_enable()
        self.device = device
        self.first: list[tuple[str, torch.Tensor]] = []
        """The weights before the first step, if they are kept."""
        self._hooks: list[Any] = []
        """They hold the masters and AdamW's state."""
        self._num_changed: torch.Tensor = torch.zeros((), dtype=torch.int64, device=device)
        for name, parameter in self.model.named_parameters():
            master = torch.empty_like(parameter, dtype=torch.float32).normal_(0, INIT_STD)
            master += 0 if parameter.dim() > 1 else parameter.detach()
            parameter.data.copy_(master)
            if keeps_first:
                self.first.append((name, parameter.detach().clone()))
            optimizer = torch.optim.AdamW(
                [master], lr=LR, betas=learner.betas, eps=learner.adam_eps, weight_decay=learner.weight_decay,
                fused=device.type == "cuda",
            )  # fmt: skip
            hook = self._update_of(master, optimizer)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _update_of(self, master: torch.Tensor, optimizer: torch.optim.Optimizer) -> Any:
        def update(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
            optimizer.step()
            master.grad = None
            rounded = master.to(parameter.dtype)
            self._num_changed += (rounded.view(torch.int16) != parameter.data.view(torch.int16)).sum()
            parameter.data.copy_(rounded)

        return update

    def close(self) -> None:
        """Free everything but the weights."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        free(self.device)

    def step(self, number: int) -> float:
        """Make a policy-gradient step on random tokens, half of them rewarded. Returns the share of the weights in
        bfloat16 that it changed."""
        torch.manual_seed(SEED + number)
        vocab_size = self.model.config.vocab_size
        tokens = torch.randint(0, vocab_size, (NUM_SEQUENCES, SEQUENCE_TOKENS[self.device.type]), device=self.device)
        advantages = torch.tensor([1.0, -1.0], device=self.device)[:, None]
        self._num_changed.zero_()
        logits = self.model(tokens).logits[:, :-1].float()
        log_probs = -torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        ).view(NUM_SEQUENCES, -1)
        (-(advantages * log_probs).mean()).backward()
        return float(self._num_changed / sum(parameter.numel() for parameter in self.model.parameters()))


def shares_of_steps(shape: str, device: torch.device, num_steps: int) -> list[float]:
    """Return the share of weights that each of the first steps changes."""
    stepped = SteppedModel(shape, device, keeps_first=False)
    shares = [stepped.step(number) for number in range(num_steps)]
    stepped.close()
    del stepped
    free(device)
    return shares


def versions_of_a_step(shape: str, device: torch.device) -> tuple[list[list[tuple[str, torch.Tensor]]], float]:
    """Return the named weights before and after the first step, and the share of them that it changed.

    The first step is the largest: AdamW moves every weight that has a gradient by the learning rate."""
    stepped = SteppedModel(shape, device, keeps_first=True)
    share = stepped.step(0)
    stepped.close()
    after = [(name, parameter.detach()) for name, parameter in stepped.model.named_parameters()]
    return [stepped.first, after], share


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
