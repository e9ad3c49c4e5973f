"""Penstock: asynchronous reinforcement-learning post-training as a service.

This package holds what every process shares: contracts, plain data types, errors, configuration, the replay queue, the
client and the command line. It does not import torch, vllm or ray.
"""

__version__ = "0.1.0"
