"""The soft cap of attention scores and logits, as Gemma 2 has it."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_cap(values: Tensor, cap: float) -> Tensor:
    """`cap · tanh(values / cap)`, written as a sigmoid.

    Compiled kernels compute a sigmoid from one fast exponential, and tanh by a routine that takes several times as
    long. In float32 the two differ by about 1e-7 · cap."""
    return 2 * cap * torch.sigmoid(values * (2 / cap)) - cap
