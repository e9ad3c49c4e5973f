"""The number types of weights and of forward and backward passes, by their names in the config."""

from __future__ import annotations

import torch

from penstock.config.run import RunConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The values of `model.dtype`, `learner.master_dtype` and `learner.compute_dtype`."""


def compute_dtype_of(config: RunConfig) -> torch.dtype:
    """The type in which the trained roles run their forward and backward passes."""
    wanted = config.learner.compute_dtype
    if wanted == "auto":
        return torch.float32 if config.model.dtype == "float32" else torch.bfloat16
    return DTYPES[wanted]
