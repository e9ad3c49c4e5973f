"""All settings of torch that affect a whole process (threads, memory, compiler), and the number types of a run."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from penstock.config.run import RunConfig

RECOMPILE_LIMIT = 64
"""How often torch may compile the code that all layers share: for each share of activations that is kept, for equal and
for mixed lengths, with and without gradients."""

LARGE_BYTES = 4 * 2**20
"""Host memory of this size and above goes back to the system as soon as it is freed."""
_M_MMAP_THRESHOLD = -3


def set_up_torch(num_threads: int, *, compiles: bool) -> None:
    """Call once when the process starts, before the GPU is first used. `compiles` says whether the process compiles
    anything."""
    torch.set_num_threads(num_threads)
    # Batches differ in length, and segments that can grow avoid gaps. A value that the environment has set is kept.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    _return_large_memory()
    if compiles:  # importing torch._dynamo takes a second or two
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT


def _return_large_memory() -> None:
    """Keep glibc from raising its threshold for large blocks by itself. Gathering layer after layer would leave gaps
    that add up to the size of the rank's part. A C library without the setting stays as it is."""
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


@cache
def compiler_keeping(share: float) -> Callable[..., Any]:
    """A backend for `torch.compile`: inductor, keeping this share of a layer's activations for the backward pass.
    Layers with the same backend share their compiled code, so each share has one."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        with functorch_config.patch(activation_memory_budget=share):
            return torch._dynamo.lookup_backend("inductor")(graph, inputs)

    return compile_graph


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The values of `model.dtype`, `learner.master_dtype` and `learner.compute_dtype`."""


def compute_dtype_of(config: RunConfig) -> torch.dtype:
    """The type in which the trained roles run their forward and backward passes."""
    wanted = config.learner.compute_dtype
    if wanted == "auto":
        return torch.float32 if config.model.dtype == "float32" else torch.bfloat16
    return DTYPES[wanted]
