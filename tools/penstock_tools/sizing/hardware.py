"""Published figures of GPUs and links, and the share of each that plans assume."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: float
    flops: float
    """Dense bfloat16 operations per second."""
    memory_rate: float
    """Memory bandwidth in bytes per second."""
    link_rate: float
    """Bandwidth to other GPUs of the node, one way, in bytes per second."""


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
"""Share of a GPU's memory that can be used. The rest is lost to fragmentation."""
CONTEXT_BYTES = 3e9
"""Memory of CUDA, NCCL and compiled kernels on each GPU."""
PROCESS_BYTES = 3e9
"""Host memory of a rank's process without any weights: Python, torch, Ray and the libraries of CUDA."""
CPU_PROCESS_BYTES = 0.6e9
"""The same for a rank, or one of the two processes of a server, on a CPU."""
CPU_OTHERS_BYTES = 1e9
"""Memory of a run's other processes on one machine: gateway, controller, Redis and Ray."""
TRAIN_EFFICIENCY = 0.42
"""Share of `flops` that forward and backward passes over packed tokens reach. bench/results/learner.json has 0.29 with
0.5B, 0.37 with 1.5B and 0.51 with 7B, on an H200 with float32 master weights, counting recomputed operations."""
PREFILL_EFFICIENCY = 0.40
"""Share of `flops` that prefill reaches."""
DECODE_EFFICIENCY = 0.70
"""Share of `memory_rate` that decoding reaches when it reads weights and KV cache."""
DECODE_FLOOR_S = 0.018
"""Seconds of one decoding step that are not memory traffic: scheduler, sampling, version stamps.
bench/results/weights_gpu.json has 20 ms in total for 64 requests, with 0.5B and with 7B on an H200."""
NETWORK_RATE = 50e9
"""Network bandwidth per GPU between nodes, in bytes per second: 400 Gbit/s."""
LINK_EFFICIENCY = 0.70
"""Share of a link's or network's bandwidth that transfers reach."""
LOAD_RATE = 135e9
"""Bytes per second at which an engine loads staged weights: 15.2 GB in 113 ms, in the same file."""
STAGING_RATE = 160e9
"""Bytes per second at which the publisher fills and hashes its buckets: 15.2 GB in 95 ms."""
PUSH_FLOOR_S = 0.1
"""Seconds of a push for announcement, commit and replies."""
HOST_TRANSFER_RATE = 5e9
"""Bytes per second of a push from host memory. One thread of a server copies the buckets from its GPU to hash them."""
HOST_LINK_RATE = 20e9
"""Bytes per second between a GPU and host memory while all GPUs of the node use their links. Not measured."""
