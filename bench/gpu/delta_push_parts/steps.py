"""Optimizer steps of a random Qwen2: float32 masters, forward and backward in bfloat16, AdamW as the learner's.

The masters are not numbers of bfloat16, as in the middle of a run. The masters of a model that was just loaded from
bfloat16 are, and its first steps change fewer weights.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

from penstock.config.learner import LearnerConfig
from weights_gpu_parts.engine import SHAPES

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
