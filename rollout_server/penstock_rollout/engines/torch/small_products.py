"""Chooses the library that multiplies matrices on an ARM CPU, by the size of a forward pass.

There PyTorch gives products of more than eight rows to oneDNN, which prepares its kernel and the weights again for each
of them: about 0.3 ms. For a small model or few rows, that is longer than the product itself takes with BLAS. Above
MAX_MULTIPLICATIONS oneDNN is faster. On other CPUs and on GPUs, PyTorch's own choice stays.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from typing import Any

import torch

MAX_MULTIPLICATIONS = 8_000_000
"""Both libraries are equally fast here, as the mean of the products of a pass. On a Neoverse N1, float32, Qwen2: with
hidden sizes of 128, 256, 512 and 1024, forward passes of 400, 60, 22 and 8 tokens."""
ARM = ("aarch64", "arm64")


class SmallProducts:
    """Turns oneDNN off for forward passes of `model` that are faster without it. The switch is one for the whole
    process, so one thread may use this."""

    def __init__(self, model: Any, machine: str | None = None) -> None:
        """`machine` is the kind of CPU, by default that of this one."""
        sizes = [module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear)]
        is_slow = (machine or platform.machine()) in ARM and model.device.type == "cpu" and bool(sizes)
        self.max_tokens = MAX_MULTIPLICATIONS * len(sizes) // sum(sizes) if is_slow else 0
        """The longest forward pass without oneDNN. 0: none."""

    @contextlib.contextmanager
    def passing(self, num_tokens: int) -> Iterator[None]:
        """Surrounds a forward pass of this many tokens. Afterwards the switch is as it was."""
        onednn: Any = torch.backends.mkldnn
        was_on: bool = onednn.enabled
        onednn.enabled = was_on and num_tokens > self.max_tokens
        try:
            yield
        finally:
            onednn.enabled = was_on
