"""GPUs and links, by their makers' figures; and the shares of them that are counted on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: float
    flops: float
    """Dense bfloat16 operations a second."""
    memory_rate: float
    """Bytes a second."""
    link_rate: float
    """Bytes a second to other GPUs of its node, one way."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("l40s", 48e9, 362e12, 0.864e12, 32e9),
        Gpu("a100", 80e9, 312e12, 2.04e12, 300e9),
        Gpu("h100", 80e9, 989e12, 3.35e12, 450e9),
        Gpu("h200", 141e9, 989e12, 4.8e12, 450e9),
        Gpu("b200", 180e9, 2250e12, 8.0e12, 900e9),
    )
}
GPUS_PER_NODE = 8

USABLE_MEMORY = 0.92
"""Of a GPU's: the rest is fragmentation."""
CONTEXT_BYTES = 3e9
"""CUDA, NCCL and compiled kernels."""
TRAIN_EFFICIENCY = 0.42
"""Of `flops`, in forward and backward passes over packed tokens. bench/results/learner.json has 0.29 with 0.5B, 0.37
with 1.5B and 0.51 with 7B on an H200 with float32 masters, recomputed operations included."""
PREFILL_EFFICIENCY = 0.40
DECODE_EFFICIENCY = 0.70
"""Of `memory_rate`, when weights and KV cache are read."""
DECODE_FLOOR_S = 0.018
"""Of one decoding step beside memory traffic: scheduler, sampling, stamps. bench/results/weights_gpu.json has 20 ms in
all for 64 requests with 0.5B and with 7B on an H200."""
LINK_EFFICIENCY = 0.70
LOAD_RATE = 135e9
"""Bytes a second that an engine loads from staged memory: 15.2 GB in 113 ms, in the same file."""
STAGING_RATE = 160e9
"""Bytes a second into the publisher's buckets, hashed: 15.2 GB in 95 ms."""
PUSH_FLOOR_S = 0.1
"""Announcement, commit and answers."""
HOST_TRANSFER_RATE = 5e9
"""Bytes a second by gloo between hosts with a fast network; 1.3e9 on the two cores of bench/results/weights.json."""
