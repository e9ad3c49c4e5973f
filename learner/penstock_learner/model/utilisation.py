"""Measures how well the ranks use their devices: peak memory, and model FLOPs utilisation (MFU)."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import Any

import torch

PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
}
"""Dense bfloat16 FLOPs per second, by a part of the device's name. The first match counts."""


@dataclass(frozen=True)
class RankUsage:
    """Memory and device of one rank at one moment."""

    memory_peak_bytes: int
    """Peak of the device's allocator, or on a CPU, peak of the process."""
    device_name: str
    num_parameters: int
    """Parameters of the whole model. Of a mixture of experts, those that one token passes through."""


def measure_usage(model: torch.nn.Module, device: torch.device) -> RankUsage:
    if device.type == "cuda":
        peak, name = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_name(device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak, name = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "cpu"
    return RankUsage(peak, name, num_used_parameters(model))


def num_used_parameters(model: torch.nn.Module) -> int:
    """Parameters that one token passes through. Fused experts have one more dimension than other weights."""
    lm: Any = getattr(model, "lm", None)
    per_token = None if lm is None else getattr(lm.config.get_text_config(), "num_experts_per_tok", None)
    return sum(
        parameter.numel() * per_token // parameter.shape[0] if per_token and parameter.dim() == 3 else parameter.numel()
        for parameter in model.parameters()
    )


def peak_flops(device_name: str, configured: float) -> float:
    """Peak FLOPs per second of one rank: as configured, else by the device's name, else 0."""
    if configured:
        return configured
    return next((flops for part, flops in PEAK_FLOPS.items() if part in device_name), 0.0)


def mfu(num_parameters: int, num_tokens: float, seconds: float, peak: float) -> float:
    """Model FLOPs utilisation of an update, with 6 FLOPs per parameter and token. 0 if the `peak` of all ranks is not
    known."""
    return 6 * num_parameters * num_tokens / (seconds * peak) if peak and seconds else 0.0
